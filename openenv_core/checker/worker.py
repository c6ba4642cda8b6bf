"""Runs checks with pytest in a separate process: `python -m openenv_core.checker.worker FD`.

Checks import the environment and play it in their own process, so whatever it does to that process only affects this
worker. The `Job` is one line of JSON on standard input; results are written to FD as lines of JSON. Standard input
closes when the parent ends.
"""

import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn, TextIO

import pytest

from openenv_core.checker import suite
from openenv_core.checker.runner import Job
from openenv_core.checker.subject import Subject

TERMINATED: Final = 143

ORPHAN_CLEANUP_TIMEOUT_S: Final = 20.0
"""Seconds for cleaning up once the parent has ended."""

_REMOVALS: Final = 5
"""Attempts to remove temporary files: threads that are still running may add files meanwhile."""

_OPTIONS: Final = (
    # The author's pytest configuration and plugins are meant for the author's own tests.
    "--disable-plugin-autoload",
    "--noconftest",
    *("-c", os.devnull),
    *("--import-mode", "importlib"),
    *("--assert", "plain"),
    *("--capture", "no"),
    *(word for name in ("cacheprovider", "faulthandler", "warnings") for word in ("-p", f"no:{name}")),
)


class CheckPlugin:
    """A pytest plugin that selects the tests of a job's checks, and reports each result."""

    def __init__(self, job: Job, out: TextIO) -> None:
        self._job = job
        self._out = out

    @pytest.fixture(scope="session")
    def subject(self) -> Iterator[Subject]:
        """The environment under test."""
        with Subject(self._job.target, self._job.limits, token=self._job.token) as subject:
            yield subject

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select the tests, in the order of the job's checks."""
        by_name = {item.name.removeprefix("test_"): item for item in items}
        items[:] = [by_name[name] for name in self._job.checks]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Report the start and end of a check."""
        self._out.write(json.dumps({"begin": item.name.removeprefix("test_")}) + "\n")
        try:
            return (yield)
        finally:
            if (result := item.stash.get(suite.RESULT, None)) is not None:
                self._out.write(result.model_dump_json() + "\n")


def main() -> NoReturn:
    """Run the checks of the job on standard input."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which decides
    signal.signal(signal.SIGTERM, _on_sigterm)
    job = Job.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_watch, args=(job.temporary,), name="openenv-owner", daemon=True).start()
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    argv = [*_OPTIONS, "--rootdir", job.temporary, str(Path(suite.__file__))]
    try:
        with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as out:
            status = pytest.main(argv, plugins=[CheckPlugin(job, out)])
    except BaseException:
        status = pytest.ExitCode.INTERRUPTED
    if status is pytest.ExitCode.INTERRUPTED:
        # Files of the aborted check; the parent may be gone, and cannot remove them.
        _remove(job.temporary)
        os._exit(TERMINATED)
    os._exit(0)  # does not wait for threads that the environment left running


def _on_sigterm(*_: object) -> NoReturn:
    raise KeyboardInterrupt  # not caught by `except Exception` of checks and environments


def _remove(temporary: str) -> None:
    for _ in range(_REMOVALS):
        shutil.rmtree(temporary, ignore_errors=True)
        if not os.path.exists(temporary):
            return


def _watch(temporary: str) -> None:
    """Terminate this process when its parent has ended; force it after a timeout."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORPHAN_CLEANUP_TIMEOUT_S)
    _remove(temporary)
    os._exit(1)


if __name__ == "__main__":
    main()
