"""Runs checks in a separate process: `python -m openenv_core.checker.worker FD`.

Checks import the environment and play it in their own process, so whatever it does to that process only affects this
worker. The `Job` is one line of JSON on standard input; FD is a `multiprocessing` connection, on which each check has a
message at its begin and its result as JSON. Standard input closes when the parent ends.
"""

import faulthandler
import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Final, NoReturn

from openenv_core.checker.check import select_checks
from openenv_core.checker.results import run_check
from openenv_core.checker.runner import Job
from openenv_core.checker.subject import Subject

TERMINATED: Final = 143

ORPHAN_CLEANUP_TIMEOUT_S: Final = 20.0
"""Seconds for cleaning up once the parent has ended."""

_REMOVALS: Final = 5
"""Attempts to remove temporary files: threads that are still running may add files meanwhile."""


def main() -> NoReturn:
    """Run the checks of the job on standard input."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which decides
    signal.signal(signal.SIGTERM, _on_sigterm)
    temporary = os.environ["TMPDIR"]
    job = Job.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_watch, args=(temporary,), name="openenv-owner", daemon=True).start()
    try:
        with (
            Connection(int(sys.argv[1]), readable=False) as messages,
            Subject(job.target, job.limits, token=job.token) as subject,
        ):
            for check in select_checks(names=job.checks):
                messages.send_bytes(b"begin")
                messages.send_bytes(run_check(subject, check).model_dump_json().encode())
    except BaseException:
        # Files of the aborted check; the parent may be gone, and cannot remove them.
        _remove(temporary)
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
