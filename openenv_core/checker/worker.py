"""Runs checks in a separate process: `python -m openenv_core.checker.worker FD`.

Checks import the environment and play it in their own process, so whatever it does to that process only affects this
worker. The `Job` is a file in the folder of temporary files; FD is a `multiprocessing` connection, on which each check
has a message at its begin, with the process's id, and its result as JSON. A guard (`openenv_core.guard`) sends SIGTERM
when the parent has ended or no longer needs it, and removes the temporary files.
"""

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NoReturn

from openenv_core.checker.check import select_checks
from openenv_core.checker.results import run_check
from openenv_core.checker.runner import JOB_FILE, Job
from openenv_core.checker.subject import Subject

TERMINATED: Final = 143


def main() -> NoReturn:
    """Run the checks of the job."""
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _on_sigterm)
    job = Job.model_validate_json(Path(os.environ["TMPDIR"], JOB_FILE).read_bytes())
    try:
        with (
            Connection(int(sys.argv[1]), readable=False) as messages,
            Subject(job.target, job.limits, token=job.token) as subject,
        ):
            for check in select_checks(names=job.checks):
                messages.send_bytes(str(os.getpid()).encode())
                messages.send_bytes(run_check(subject, check).model_dump_json().encode())
    except BaseException:
        os._exit(TERMINATED)
    os._exit(0)  # does not wait for threads that the environment left running


def _on_sigterm(*_: object) -> NoReturn:
    raise KeyboardInterrupt  # not caught by `except Exception` of checks and environments


if __name__ == "__main__":
    main()
