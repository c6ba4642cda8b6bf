"""The processes of one start of a replica on Monarch, and calls to them."""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openenv_core.providers.process import LOG_BYTES
from rl_bridge.errors import BridgeError, MissingDependencyError, RemoteError
from rl_bridge.services import own_process
from rl_bridge.services.balancer import TargetGoneError
from rl_bridge.services.placement import ServiceOptions

try:
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
    from monarch._src.actor.endpoint import EndpointProperty
    from monarch.actor import ActorError, default_bootstrap_cmd
    from monarch.config import configure
except ImportError as error:
    raise MissingDependencyError.of_import(error) from error

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class MeshTarget:
    """The actors of one start of a replica, one per process, by rank; it can be sent between processes."""

    replica: int
    incarnation: int
    ranks: tuple[Any, ...]

    async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an endpoint on all ranks and return the first rank's value.

        An exception other than a BridgeError is raised as RemoteError; TargetGoneError means that a process is gone. A
        failing rank ends the call at once, because the others may be waiting for it.
        """
        if len(self.ranks) == 1:
            return await _await_reply(getattr(self.ranks[0], name).choose(*args, **kwargs))
        return (await self.call_all(name, args, kwargs))[0]

    def first_rank(self) -> "MeshTarget":
        """See `ReplicaTarget.first_rank`."""
        return replace(self, ranks=self.ranks[:1])

    async def call_all(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call an endpoint on all ranks and return every rank's value. Raises as `call` does."""
        # All are sent before the first await, so that every rank gets concurrent calls in the same order. Each is one
        # actor, so `choose` has no choice; with torchmonarch 0.7 `call_one` would leak a kilobyte here with every call.
        futures = [getattr(actor, name).choose(*args, **kwargs) for actor in self.ranks]
        replies = [asyncio.ensure_future(_await_reply(future)) for future in futures]
        try:
            return list(await asyncio.gather(*replies))
        finally:
            for reply in replies:
                reply.cancel()
            await asyncio.gather(*replies, return_exceptions=True)


async def _await_reply(future: Any) -> Any:
    try:
        return await future
    except SupervisionError as error:
        raise TargetGoneError(_describe_loss(error)) from error
    except ActorError as error:
        if isinstance(error.exception, BridgeError):  # ours: callers handle it
            raise error.exception from error
        raise RemoteError(
            f"the actor raised {type(error.exception).__name__}: {error.exception}\n{error.exception_formatted}"
        ) from error
    except Exception as error:
        # An exception that cannot be unpickled arrives as the failure to unpickle it.
        raise RemoteError(
            f"the actor raised an exception that cannot be sent between processes: {error}"
        ) from error


def endpoints_of(actor: type[Any]) -> frozenset[str]:
    """Return the names of an actor class's public endpoints."""
    return frozenset(
        name
        for name in dir(actor)
        if not name.startswith("_") and isinstance(inspect.getattr_static(actor, name), EndpointProperty)
    )


STOP_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 10.0
LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 8

_MARK_VARIABLE = "ROPEWALK_MARK"
_LOG_VARIABLE = "ROPEWALK_ROLE_LOG"

# A terminal sends Ctrl-C to every process of its foreground group. Only the controller may act on it, so that replicas
# are stopped in order; and a replica's output belongs in its log, not between progress lines. If another host has no
# such folder and cannot make it, the output is discarded. Only a host's worker knows which of its GPUs belong to this
# job, for example the sixth and the seventh; the controller does not, so they are picked here by index.
_SHELL = """mkdir -p "${ROPEWALK_ROLE_LOG%/*}" 2>/dev/null
( : >>"$ROPEWALK_ROLE_LOG" ) 2>/dev/null || ROPEWALK_ROLE_LOG=/dev/null
if [ -n "${ROPEWALK_GPU-}" ]; then
  export ROPEWALK_GPUS="${CUDA_VISIBLE_DEVICES-}"
  if [ -n "$ROPEWALK_GPUS" ]; then
    CUDA_VISIBLE_DEVICES=$(echo "$ROPEWALK_GPUS," | cut -d, -f"$ROPEWALK_GPU_FIELDS")
  else
    CUDA_VISIBLE_DEVICES=$ROPEWALK_GPU
  fi
  export CUDA_VISIBLE_DEVICES
fi
if [ -n "${ROPEWALK_ALLOC_CONF-}" ] && [ -z "${PYTORCH_ALLOC_CONF-}${PYTORCH_CUDA_ALLOC_CONF-}" ]; then
  export PYTORCH_ALLOC_CONF="$ROPEWALK_ALLOC_CONF"
fi
trap "" INT
exec "$0" "$@" >>"$ROPEWALK_ROLE_LOG" 2>&1
"""


class Incarnation:
    """The processes of one start of a replica, from host number `host` on.

    The future `lost` gets the reason when one of them is gone.
    """

    def __init__(
        self,
        name: str,
        hosts: Any,
        options: ServiceOptions,
        environment: Callable[[int], dict[str, str]],
        logs: Path,
        *,
        heartbeat_s: float,
        local: bool,
        host: int,
        on_stopped: Callable[[], None],
    ) -> None:
        self.host = host
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._mark = make_mark()
        self._heartbeat_s = heartbeat_s
        self._on_stopped = on_stopped
        self._local = local
        self._pid_watcher: asyncio.Task[None] | None = None
        label = f"{name.replace('-', '_')}_{self._mark}"
        ranks = options.hosts * options.procs
        self._logs = [
            (logs / (f"{name}.log" if ranks == 1 else f"{name}-{rank}.log")).absolute()
            for rank in range(ranks)
        ]
        self._label = label
        self._procs = hosts.spawn_procs(
            per_host={label: options.procs},
            bootstrap_command=lambda point: _make_bootstrap_command(
                {
                    **environment(point.rank),
                    _MARK_VARIABLE: self._mark,
                    _LOG_VARIABLE: str(self._logs[point.rank]),
                }
            ),
        )

    def spawn(self, actor: type[Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Spawn an actor in each process; returns them by rank."""
        mesh = self._procs.spawn(self._label, actor, *args)
        extent = mesh.extent
        labels = list(extent.labels)
        return tuple(
            mesh.slice(**dict(zip(labels, point, strict=True)))
            for point in itertools.product(*(range(extent[label]) for label in labels))
        )

    def lose(self, reason: str) -> None:
        """Mark this start as lost: one of its processes is gone, or cannot do its work."""
        if not self.lost.done():
            self.lost.set_result(reason)

    def watch_pids(self, pids: Iterable[int]) -> None:
        """Watch the processes from now on, if they run on this machine.

        Monarch watches too, but to it a process that dies during a query seems silent, not dead.
        """
        if self._local:
            self._pid_watcher = asyncio.ensure_future(self._poll_pids(tuple(pids)))

    async def _poll_pids(self, pids: tuple[int, ...]) -> None:
        while all(_is_running(pid) for pid in pids):  # noqa: ASYNC110 - they are other processes
            await asyncio.sleep(self._heartbeat_s)
        self.lose(PROCESS_ENDED)

    async def stop(self) -> None:
        """End its remaining processes, and those that they started. Bounded in time; raises nothing."""
        if self._pid_watcher is not None:
            self._pid_watcher.cancel()
        try:
            if self._local and self.lost.done():
                kill_marked(self._mark)
            # Stopping a mesh that has lost a process fails, which does not matter.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._procs.stop()
        finally:
            if self._local:
                kill_marked(self._mark)
            self._on_stopped()

    def tail(self) -> str:
        """Return the last lines of its logs."""
        return "\n".join(_read_tail(log) for log in self._logs if log.exists())


async def close(target: MeshTarget, endpoints: frozenset[str]) -> None:
    """Call a target's `close` endpoint, if it has one. Bounded in time; raises nothing."""
    if "close" in endpoints:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await target.call("close", (), {})


def kill_marked(mark: str) -> None:
    """Kill every process on this machine that was started, directly or indirectly, with a mark."""
    variable = f"{_MARK_VARIABLE}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            # Other users' processes cannot be read, and some end while they are inspected.
            with contextlib.suppress(OSError):
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] not in b"ZX"  # the state follows the name, which may hold anything


def _read_tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return f"--- {log} ---\n" + "\n".join(lines[-LOG_TAIL_LINES:])


def rotate_logs(logs: Path) -> None:
    """Rotate each log beyond `LOG_BYTES`: its end becomes `NAME.log.1`, and it is truncated; writers append."""
    for log in logs.glob("*.log"):
        with contextlib.suppress(OSError):  # it is gone, or the disk is full: the next check tries again
            if log.stat().st_size > LOG_BYTES:
                with log.open("rb") as file, Path(f"{log}.1").open("wb") as rotated:
                    file.seek(-LOG_BYTES, os.SEEK_END)
                    shutil.copyfileobj(file, rotated)
                os.truncate(log, 0)


def _make_bootstrap_command(environment: dict[str, str]) -> Any:
    command = default_bootstrap_cmd().with_env(environment)
    command.args = ["-c", _SHELL, command.program, "-c", own_process.PROGRAM, *command.args]
    command.program = "/bin/sh"
    return command


MAX_MISSED_HEARTBEATS = 10
MIN_SILENCE_S = 5.0
"""The least silence that counts as a death: a machine under load answers late."""

PROCESS_ENDED = "its process ended"
"""The beginning of a loss's reason if a process is known to be dead rather than silent."""

_POLL_INTERVAL_VARIABLE = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"
_DEATH_PATTERN = re.compile(r"the process this actor was running on failed: ([^\s)]+\)?)")


def make_mark() -> str:
    """Return a random identifier of one start, which becomes part of the names of its processes and actors."""
    return f"rw{secrets.token_hex(8)}"


def supervise(heartbeat_s: float) -> None:
    """Have Monarch check processes at this interval, and fail the calls to dead ones.

    A dead process is noticed at the next check. One that does not answer, because it hangs or its host is
    unreachable, counts as dead after `MAX_MISSED_HEARTBEATS` checks. This applies to processes spawned from now on.
    """
    os.environ[_POLL_INTERVAL_VARIABLE] = f"{max(round(heartbeat_s * 1000), 1)}ms"
    reload_config_from_env()
    silence = f"{round(1000 * max(MAX_MISSED_HEARTBEATS * heartbeat_s, MIN_SILENCE_S))}ms"
    configure(get_proc_state_max_idle=silence, get_actor_state_max_idle=silence)
    # The hook stays for good: a dead process's report may arrive after its owner is gone, and Monarch's own hook would
    # turn it into a KeyboardInterrupt of whatever runs then.
    monarch.actor.unhandled_fault_hook = _on_fault


def _on_fault(failure: Any) -> None:
    """Log a failure that nothing else handled: whoever it concerns has a call in flight, which fails with it.

    One death causes several, also of actors that Monarch adds, such as the one that forwards a process's log.
    """
    logger.info("Monarch reported a failure: %s", _join_lines(failure))


def _describe_loss(error: Exception) -> str:
    """Return why a call to a process failed that is gone; the reason begins with `PROCESS_ENDED` if that is known."""
    report = _join_lines(error)
    death = _DEATH_PATTERN.search(report)
    return report if death is None else f"{PROCESS_ENDED}: {death[1]}"


def _join_lines(report: object) -> str:
    return " ".join(str(report).split())
