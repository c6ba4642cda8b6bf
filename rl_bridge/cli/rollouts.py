"""`ropewalk rollouts`: read the prompts and answers of a run's policy."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from openenv_core.cli import Command
from rl_bridge.cli.common import RUNS, with_exit_status
from rl_bridge.errors import ConfigError, NoRecordsError

PAGE_FILE = "rollouts.html"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="FOLDER",
        help="the run's folder; default: the newest in ./runs with rollouts",
    )
    parser.add_argument("--out", metavar="FILE", help=f"the HTML file to write; default: FOLDER/{PAGE_FILE}")


@with_exit_status("rollouts")
def run(arguments: argparse.Namespace) -> int:
    """Write the page; returns 0, 1 if no rollouts are found, 2 for a bad command line."""
    folder = _find_folder(arguments.run)
    _write(folder, folder / PAGE_FILE if arguments.out is None else Path(arguments.out))
    return 0


def _find_folder(name: str | None) -> Path:
    from rl_bridge.records import FOLDER, list_segment_files

    if name is not None:
        folder = Path(name)
        if not folder.is_dir():
            raise NoRecordsError(f"expected the folder of a run, there is no {name!r}")
        if not list_segment_files(folder):
            raise NoRecordsError(
                f"expected rollouts in {str(folder / FOLDER)!r}, there are none; no iteration is over yet, or the run "
                "keeps none (records.groups=0)"
            )
        return folder
    folders = [folder for folder in Path(RUNS).glob("*") if list_segment_files(folder)]
    if not folders:
        raise NoRecordsError(
            f"expected a run with rollouts in {str(Path(RUNS).absolute())!r}, found none; name its folder, or start "
            "one by ropewalk train"
        )
    return max(folders, key=lambda folder: list_segment_files(folder)[-1].stat().st_mtime)


def _write(folder: Path, out: Path) -> None:
    from rl_bridge.rollouts_page.page import render_page

    target = Path(os.path.realpath(out))  # a link stays one
    if not target.name or (os.path.exists(target) and not target.is_file()):  # such as a folder, or /dev/null
        raise ConfigError(f"expected --out with the name of a file, got {str(out)!r}, which is none")
    partial = target.with_name(f"{target.name}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(render_page(folder, _read_records(folder)))
        partial.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {str(out)!r}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or never created
            partial.unlink()
    print(
        f"{out}: {out.stat().st_size / 2**20:.1f} MB, to be opened by any browser, with or without a network"
    )


def _read_records(folder: Path) -> Iterator[bytes]:
    from rl_bridge.records import read_lines

    try:
        yield from read_lines(folder)
    except OSError as error:  # `_write` would take it for an error of writing
        raise NoRecordsError(f"cannot read {str(error.filename)!r}: {error.strerror}") from error


COMMAND = Command(
    name="rollouts",
    help="write a page with the rollouts of a run, to read in a browser",
    configure=configure,
    run=run,
    examples=(
        "ropewalk rollouts",
        "ropewalk rollouts runs/seven",
        "ropewalk rollouts runs/seven --out seven.html",
    ),
)
