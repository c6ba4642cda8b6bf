"""One worker process of a fleet: `python -m servers.fleet.worker`, which supervisors start.

Its standard input is a pipe from the supervisor: first the plan, then nothing, until the supervisor ends, of
whatever cause, and the pipe with it; the worker ends then too.
"""

import os
import socket
import sys
from contextlib import suppress
from functools import partial

from openenv_core.errors import OpenEnvError
from servers.fleet.plan import WorkerPlan

FAILED = 2
"""The exit status of a worker that could not start whatever is tried again."""

PEER_SOCKET_TIMEOUT_S = 1.0
"""How long another worker's socket is waited for."""

READY = b"\x01"
"""What a worker says once it accepts connections; one that cannot start says why instead."""


def main() -> int:
    """Run the worker."""
    plan, lifeline = _take_plan()
    for fd in (plan.listener, plan.slots, plan.ready):
        os.set_inheritable(fd, False)
    try:
        return _serve(plan, lifeline)
    except OpenEnvError as error:
        # It is the same for all, so that the supervisor says it, once.
        with suppress(OSError):  # it was healthy before, and the pipe is closed
            os.write(plan.ready, str(error).encode())
        return FAILED
    except KeyboardInterrupt:
        return 0  # while it started; the supervisor got it too
    finally:
        _leave(plan)


def _leave(plan: WorkerPlan) -> None:
    if os.getppid() == plan.supervisor:
        return
    # It was killed, so its folder is for the workers to remove: the last one can. What was killed too, or had not yet
    # been told its place, has left a socket that nobody answers at.
    own = plan.private_socket(plan.index)
    with suppress(OSError):
        for entry in os.scandir(plan.folder):
            if entry.path == own or not _answers(entry.path):
                os.unlink(entry.path)
        os.rmdir(plan.folder)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(PEER_SOCKET_TIMEOUT_S)
        try:
            asked.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:  # a queue that is full, for one
            return True
    return True


def _take_plan() -> tuple[WorkerPlan, int]:
    lifeline = os.dup(0)  # not inheritable
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(lifeline, 1)  # one byte, so that nothing beyond the line is taken
        if not part:
            sys.exit(0)  # the supervisor has ended already
        line += part
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return WorkerPlan.read(bytes(line)), lifeline


def _serve(plan: WorkerPlan, lifeline: int) -> int:
    from servers.assembly import assemble_worker
    from servers.hosting import host
    from servers.logs import configure_logging
    from servers.target import load_app

    configure_logging(plan.log_level, plan.settings.tokens)
    served = assemble_worker(load_app(plan.app), plan)
    path = plan.private_socket(plan.index)
    if os.path.exists(path):
        os.unlink(path)
    with socket.socket(fileno=plan.listener) as listener, socket.socket(socket.AF_UNIX) as private:
        try:
            private.bind(path)
        except FileNotFoundError:
            return 0  # the supervisor was killed, and the other workers took the folder with them
        private.listen()

        def ready() -> None:
            with suppress(BrokenPipeError):  # the supervisor was killed; the lifeline says so too
                os.write(plan.ready, READY)
            os.close(plan.ready)

        return host(
            served,
            [listener, private],
            drain_s=plan.settings.drain_s,
            on_started=ready,
            lifeline=lifeline,
            on_cut=partial(_leave, plan),
        )


if __name__ == "__main__":
    sys.exit(main())
