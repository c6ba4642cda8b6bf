"""Benchmarks of hours, in parts: what a part has found is kept at once, so that what was interrupted can go on."""

import argparse
import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.wire.figures import Figures
from rl_bridge.errors import RunInUseError
from rl_bridge.loops.folder_lock import LOCK_FILE, folder_of_ones_own

PLAN: Final = "plan.json"
FILES: Final = "files"
"""In the plan's file, beside the plan: the digests of the files that say what is measured. Older ones have none."""


class Parts:
    """The parts of one benchmark, measured one after another, or taken from where they were kept.

    Args:
        folder: Where they are kept.
        seconds: How long each takes, about, by its name; all of them, in order.
        figures: What is found is added to.
        progress: Told what is under way.
    """

    def __init__(
        self, folder: Path, seconds: Mapping[str, float], figures: Figures, progress: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self._seconds = seconds
        self._figures = figures
        self._progress = progress

    def measure(self, name: str, measure: Callable[[Path, Figures], None]) -> bool:
        """Measure a part, unless it is kept already. A part that fails is noted, and the others go on.

        Args:
            name: One of those that there are.
            measure: Told a folder of its own, which is not there yet, and what to add figures to. What it prints
                goes to a log beside the folder.

        Returns:
            Whether there are figures of it.
        """
        kept = kept_at(self.folder, name)
        if kept.is_file():
            self._progress(f"{name}: kept in {kept}")
        else:
            try:
                found = self._measured(name, measure)
            except Exception as error:
                log = self._log(name)
                with log.open("a", encoding="utf-8") as file:
                    traceback.print_exc(file=file)
                self._figures.notes.append(f"{name}: {type(error).__name__}: {error} ({log})")
                return False
            whole = kept.with_name(f"{kept.name}.partial")
            whole.write_text(json.dumps(found.as_json(), indent=1) + "\n", encoding="utf-8")
            whole.replace(kept)
        self._figures.take(json.loads(kept.read_text(encoding="utf-8")))
        return True

    def _measured(self, name: str, measure: Callable[[Path, Figures], None]) -> Figures:
        names = list(self._seconds)
        place = names.index(name)
        left = sum(self._seconds[one] for one in names[place:] if not kept_at(self.folder, one).is_file())
        log = self._log(name)
        self._progress(
            f"{name}: part {place + 1} of {len(names)}, {datetime.now(UTC):%H:%M:%S} UTC, about {_told(left)} left for "
            f"all; {log}"
        )
        shutil.rmtree(self.folder / name, ignore_errors=True)  # of an attempt that was interrupted
        found = Figures()
        with log.open("w", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
            measure(self.folder / name, found)
        return found

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def kept_at(folder: Path, name: str) -> Path:
    """Return where the figures of a part are, once it is done: what is there of others may be half of it."""
    return folder / f"{name}.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where parts are kept."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--folder",
        type=Path,
        help="a new folder for what each part finds and leaves; by default runs/NAME-<date>-<time>, with --quick none",
    )
    where.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="go on where that folder ends, with the plan that it has",
    )


@contextlib.contextmanager
def begun(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    plan: Mapping[str, Any],
    *,
    name: str,
    options: Sequence[str],
    files: Iterable[str],
) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Open the folder of a benchmark's parts, for this process alone.

    What cannot be opened ends the command as options do that make no sense.

    Args:
        parser: Of the command.
        arguments: What it was given.
        plan: What is measured, as JSON has it.
        name: The benchmark's.
        options: Those of the command that change the plan.
        files: Those that say what is measured beside the plan. A folder is resumed only while they are as they were.

    Yields:
        The folder, and the plan: where it is resumed, the one that it was begun with.
    """
    with contextlib.ExitStack() as stack:
        if arguments.resume is not None:
            folder = arguments.resume
            if given := [one for one in options if getattr(arguments, one) not in (None, False)]:
                parser.error(f"expected --resume without --{given[0]}: the plan is that of {folder}")
            plan, digests = _read(parser, folder, name)
            stack.enter_context(_alone(parser, folder))
            _require_the_same(parser, folder, digests)
        else:
            digests = {path: _digest(parser, path) for path in files}
            folder = stack.enter_context(_new_folder(parser, arguments, name))
            stack.enter_context(_alone(parser, folder))
            told = json.dumps({**plan, FILES: digests}, indent=1)
            (folder / PLAN).write_text(f"{told}\n", encoding="utf-8")
        yield folder, plan


@contextlib.contextmanager
def _new_folder(parser: argparse.ArgumentParser, arguments: argparse.Namespace, name: str) -> Iterator[Path]:
    if arguments.quick and arguments.folder is None:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as made:
            yield Path(made)
        return
    folder = arguments.folder or Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"expected a new folder, {str(folder)!r} has something in it; --resume goes on in it")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{folder}: {resuming(name, folder)}", file=sys.stderr)
    yield folder


def _read(
    parser: argparse.ArgumentParser, folder: Path, name: str
) -> tuple[Mapping[str, Any], Mapping[str, str] | None]:
    """The plan that a folder was begun with, and the digests of its files."""
    try:
        found = {**json.loads((folder / PLAN).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"expected a folder that python -m benchmarks.{name} has begun, got another: {error}")
    return found, found.pop(FILES, None)


@contextlib.contextmanager
def _alone(parser: argparse.ArgumentParser, folder: Path) -> Iterator[None]:
    """Nobody else measures there: a part that is under way would be taken for one that was interrupted, and removed."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_of_ones_own(folder))
        except RunInUseError:
            parser.error(
                f"expected the folder {str(folder)!r} to be free, another process measures in it, which "
                f"{str(folder / LOCK_FILE)!r} names; wait for its end, or end it, and resume then"
            )
        except OSError as error:
            parser.error(f"expected a folder that can be written to, got {str(folder)!r}: {error}")
        yield


def _require_the_same(
    parser: argparse.ArgumentParser, folder: Path, digests: Mapping[str, str] | None
) -> None:
    if digests is None:
        print(
            f"{folder / PLAN} has no digests of the files that say what is measured: they could not be compared with "
            "those that it was begun with",
            file=sys.stderr,
        )
        return
    if other := [path for path, digest in digests.items() if _digest(parser, path) != digest]:
        parser.error(
            f"expected {', '.join(other)} as when {str(folder)!r} was begun, got something else: parts of both would "
            "be told as one; put back what was there, or begin a new folder"
        )


def _digest(parser: argparse.ArgumentParser, path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        parser.error(f"expected {path!r}, which says what is measured, below the working directory: {error}")


def resuming(name: str, folder: Path) -> str:
    """Return what is said of a folder of parts."""
    return f"parts are kept as they end; go on by: python -m benchmarks.{name} --resume {folder}"


def _told(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02d} h"
