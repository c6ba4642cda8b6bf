"""One worker process of a fleet: `python -m servers.fleet.worker`, started by the supervisor.

Its standard input is a socket to the supervisor, which sends the plan and nothing else, and reads how the start went.
When the supervisor ends, for any reason, so does the connection, and the worker ends too.
"""

import os
import shutil
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openenv_core.errors import ConfigurationError, OpenEnvError
from servers.settings import ServePlan, ServerSettings

if TYPE_CHECKING:
    from servers.hosting import Assembled

FAILED: Final = 2
"""Exit status of a worker that cannot start, and would not if it were restarted."""

READY: Final = b"\x01"
"""Written to the supervisor when the worker accepts connections; a worker that cannot start writes the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan(ServePlan):
    """The plan of one worker.

    Attributes:
        index: This worker's index.
        workers: Number of workers.
        private: File descriptor of its private socket.
        slots: File descriptor of the slot table.
        counts: File descriptor of the shared metrics.
        waker: File descriptor that becomes readable when this worker must check its queue.
        wakers: File descriptors that wake each worker.
        supervisor: Process id of the supervisor, which removes the folder if it lives.
        folder: Folder of the workers' private sockets.
    """

    workers: int
    supervisor: int
    index: int = 0
    private: int = -1
    slots: int = -1
    counts: int = -1
    waker: int = -1
    wakers: tuple[int, ...] = ()
    folder: str = ""

    def private_socket(self, worker: int) -> str:
        """Return the path of a worker's private socket."""
        return str(Path(self.folder) / f"{worker}.sock")


def main() -> int:
    """Run the worker."""
    plan, lifeline = _take_plan()
    for fd in (plan.listener, plan.private, plan.slots, plan.counts, plan.waker, *plan.wakers):
        os.set_inheritable(fd, False)
    try:
        return _serve(plan, lifeline)
    except OpenEnvError as error:
        # All workers fail alike, so the supervisor reports it, once.
        with suppress(OSError):  # the supervisor was killed
            os.write(lifeline, str(error).encode())
        return FAILED
    except KeyboardInterrupt:
        return 0  # during the start; the supervisor received the interrupt too
    finally:
        _remove_leftovers(plan)


def _remove_leftovers(plan: WorkerPlan) -> None:
    """Remove the folder of a supervisor that was killed; the other workers are ending too."""
    if os.getppid() != plan.supervisor:
        shutil.rmtree(plan.folder, ignore_errors=True)


def _take_plan() -> tuple[WorkerPlan, int]:
    lifeline = os.dup(0)  # not inheritable
    with open(lifeline, "rb", buffering=0, closefd=False) as stream:
        line = stream.readline()  # which reads nothing beyond the line
    if not line.endswith(b"\n"):
        sys.exit(0)  # the supervisor has ended already
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return WorkerPlan.from_json(line), lifeline


def _serve(plan: WorkerPlan, lifeline: int) -> int:
    from servers.hosting import host
    from servers.logs import configure_logging

    configure_logging(plan.log_level, plan.settings.tokens)
    served = _assemble(plan)
    with socket.socket(fileno=plan.listener) as listener, socket.socket(fileno=plan.private) as private:

        def ready() -> None:
            with suppress(OSError):  # the supervisor was killed; the end of file says so, too
                os.write(lifeline, READY)

        return host(
            served,
            [listener, private],
            drain_s=plan.settings.drain_s,
            on_started=ready,
            lifeline=lifeline,
            on_cut=partial(_remove_leftovers, plan),
        )


def _assemble(plan: WorkerPlan) -> "Assembled":
    """Import the application, built as one of several workers.

    Raises:
        ConfigurationError: It is not from create_app, or its class allows fewer sessions than the settings.
    """
    from servers.app import AppSettings, EnvironmentApp, building_apps
    from servers.fleet.forwarder import Forwarder, ids_of
    from servers.fleet.peers import UnixPeers
    from servers.fleet.slots import SharedSlots, SlotTable
    from servers.hosting import Assembled
    from servers.metrics import SharedCounts
    from servers.security import Guard, principals
    from servers.target import load_app

    settings, workers = plan.settings, plan.workers

    def build(served: AppSettings, _: ServerSettings) -> EnvironmentApp:
        total = settings.max_sessions or served.cap
        is_concurrent = getattr(served.factory, "SUPPORTS_CONCURRENT_SESSIONS", False)
        alone = isinstance(served.factory, type) and not is_concurrent
        if alone and total > workers:
            raise ConfigurationError(
                f"expected max_sessions of at most {workers} for {served.factory.__name__} in {workers} workers, got "
                f"{total}; a process holds one of its instances, unless the class sets "
                "SUPPORTS_CONCURRENT_SESSIONS = True"
            )
        owners = principals(settings.tokens) or [""]
        slots = SharedSlots(
            SlotTable(plan.slots, workers, len(owners), settings.max_waiting, plan.wakers),
            worker=plan.index,
            owners=owners,
            total=total,
            local=1 if alone else total,
            per_owner=settings.max_sessions_per_token,
            waker=plan.waker,
        )
        return EnvironmentApp(
            served,
            replace(settings, max_sessions=1) if alone else settings,
            slots=slots,
            new_id=ids_of(plan.index, workers),
            counts=SharedCounts(plan.counts, plan.index, workers),
        )

    with building_apps(build):
        app = load_app(plan.app)
    if not isinstance(app, EnvironmentApp):
        raise ConfigurationError(
            f"expected an app of create_app for --workers, got {type(app).__name__} at {plan.app!r}; the workers "
            "share what only such an app knows: its sessions and their cap"
        )
    slots = app.sessions.slots
    assert isinstance(slots, SharedSlots)
    forwarder = Forwarder(
        app=app.serve_admitted,
        index=plan.index,
        workers=workers,
        private=plan.private_socket(plan.index),
        peers=UnixPeers(plan.private_socket, settings.step_timeout_s),
        find_free_worker=slots.find_free_worker,
    )
    return Assembled(Guard(forwarder, settings), app.drain, app.collect_refusals(), app.cordon)


if __name__ == "__main__":
    sys.exit(main())
