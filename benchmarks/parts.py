"""Benchmarks that take hours, in parts: each part's results are saved at once, so a run can be resumed."""

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

from benchmarks.wire.measurements import Measurements
from rl_bridge.errors import RunInUseError
from rl_bridge.loops.folder_lock import LOCK_FILE, lock_folder

PLAN: Final = "plan.json"
FILES: Final = "files"
"""Key in the plan's file of the digests of the measured configuration files. Older plans lack it."""


class Parts:
    """The parts of one benchmark, measured one after another, or loaded from their result files.

    Args:
        folder: Holds the result files.
        seconds: The estimated duration of each part by its name, in order.
        measurements: Each part's results are added to it.
        progress: Called with a line about the part being measured.
    """

    def __init__(
        self,
        folder: Path,
        seconds: Mapping[str, float],
        measurements: Measurements,
        progress: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self._seconds = seconds
        self._measurements = measurements
        self._progress = progress

    def measure(self, name: str, measure: Callable[[Path, Measurements], None]) -> bool:
        """Measure a part, unless its result file exists. A failed part is noted; the next parts still run.

        Args:
            name: Name of the part.
            measure: Called with the part's folder, which does not exist yet, and the measurements to add to. Its
                output goes to a log next to the folder.

        Returns:
            Whether the part has results.
        """
        path = result_file(self.folder, name)
        if path.is_file():
            self._progress(f"{name}: kept in {path}")
        else:
            try:
                measurements = self._measure_part(name, measure)
            except Exception as error:
                log = self._log(name)
                with log.open("a", encoding="utf-8") as file:
                    traceback.print_exc(file=file)
                self._measurements.notes.append(f"{name}: {type(error).__name__}: {error} ({log})")
                return False
            partial = path.with_name(f"{path.name}.partial")
            partial.write_text(json.dumps(measurements.as_json(), indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        self._measurements.add_json(json.loads(path.read_text(encoding="utf-8")))
        return True

    def _measure_part(self, name: str, measure: Callable[[Path, Measurements], None]) -> Measurements:
        names = list(self._seconds)
        index = names.index(name)
        remaining_s = sum(
            self._seconds[part] for part in names[index:] if not result_file(self.folder, part).is_file()
        )
        log = self._log(name)
        self._progress(
            f"{name}: part {index + 1} of {len(names)}, {datetime.now(UTC):%H:%M:%S} UTC, "
            f"about {_format_duration(remaining_s)} left for all; {log}"
        )
        shutil.rmtree(self.folder / name, ignore_errors=True)  # left by an interrupted attempt
        measurements = Measurements()
        with log.open("w", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
            measure(self.folder / name, measurements)
        return measurements

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def result_file(folder: Path, name: str) -> Path:
    """Return the file of a part's results, which exists once the part is complete."""
    return folder / f"{name}.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the folder of the parts."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--folder",
        type=Path,
        help="a new folder for the results of each part; by default runs/NAME-<date>-<time>, with --quick none",
    )
    where.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="continue the benchmark in that folder, with its plan",
    )


@contextlib.contextmanager
def open_folder(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    plan: Mapping[str, Any],
    *,
    name: str,
    options: Sequence[str],
    files: Iterable[str],
) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Open and lock the folder of a benchmark's parts.

    If the folder cannot be opened, the command exits with a usage error.

    Args:
        parser: The command's parser.
        arguments: The parsed command line.
        plan: The plan as JSON values.
        name: Name of the benchmark.
        options: Options of the command that change the plan; they cannot be combined with --resume.
        files: Measured configuration files. A folder can be resumed only if they are unchanged.

    Yields:
        The folder, and the plan. A resumed folder keeps the plan that it was started with.
    """
    with contextlib.ExitStack() as stack:
        if arguments.resume is not None:
            folder = arguments.resume
            if conflicting := [
                option for option in options if getattr(arguments, option) not in (None, False)
            ]:
                parser.error(f"expected --resume without --{conflicting[0]}: the plan is that of {folder}")
            plan, digests = _read(parser, folder, name)
            stack.enter_context(_lock_folder(parser, folder))
            _require_unchanged(parser, folder, digests)
        else:
            digests = {path: _digest(parser, path) for path in files}
            folder = stack.enter_context(_new_folder(parser, arguments, name))
            stack.enter_context(_lock_folder(parser, folder))
            content = json.dumps({**plan, FILES: digests}, indent=1)
            (folder / PLAN).write_text(f"{content}\n", encoding="utf-8")
        yield folder, plan


@contextlib.contextmanager
def _new_folder(parser: argparse.ArgumentParser, arguments: argparse.Namespace, name: str) -> Iterator[Path]:
    if arguments.quick and arguments.folder is None:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as temporary:
            yield Path(temporary)
        return
    folder = arguments.folder or Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{str(folder)!r} is not empty; name a new folder, or continue that one with --resume")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{folder}: {resume_hint(name, folder)}", file=sys.stderr)
    yield folder


def _read(
    parser: argparse.ArgumentParser, folder: Path, name: str
) -> tuple[Mapping[str, Any], Mapping[str, str] | None]:
    """Return the plan that a folder was started with, and the digests of its files."""
    try:
        plan = {**json.loads((folder / PLAN).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"{str(folder)!r} is no folder of python -m benchmarks.{name}: {error}")
    return plan, plan.pop(FILES, None)


@contextlib.contextmanager
def _lock_folder(parser: argparse.ArgumentParser, folder: Path) -> Iterator[None]:
    """Lock the folder: another process would mistake a part in progress for an interrupted one and remove it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(folder))
        except RunInUseError:
            parser.error(
                f"another process, named in {str(folder / LOCK_FILE)!r}, is measuring in {str(folder)!r}; "
                "wait until it ends, or end it, then resume"
            )
        except OSError as error:
            parser.error(f"expected a folder that can be written to, got {str(folder)!r}: {error}")
        yield


def _require_unchanged(
    parser: argparse.ArgumentParser, folder: Path, digests: Mapping[str, str] | None
) -> None:
    if digests is None:
        print(
            f"{folder / PLAN} has no digests of the configuration files: whether they have changed since it was "
            "written could not be checked",
            file=sys.stderr,
        )
        return
    if changed := [path for path, digest in digests.items() if _digest(parser, path) != digest]:
        parser.error(
            f"{', '.join(changed)} changed after {str(folder)!r} was created, so its parts would not be comparable; "
            "restore the files, or start in a new folder"
        )


def _digest(parser: argparse.ArgumentParser, path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        parser.error(f"cannot read the configuration {path!r} in the working directory: {error}")


def resume_hint(name: str, folder: Path) -> str:
    """Return the line that says how to resume a folder."""
    return f"finished parts are kept; resume with: python -m benchmarks.{name} --resume {folder}"


def _format_duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02d} h"
