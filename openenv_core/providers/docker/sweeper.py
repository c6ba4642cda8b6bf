"""Removes a program's containers when the program has ended, however it ended.

`main` is the program of a process of its own, with the arguments ADDRESS (JSON of an `EngineAddress`) OWNER RUN.

Its standard input is a pipe whose other end only the program holds. The byte "q" says that the program is exiting and
creates no more containers; "n", that it has had none. End of file, or a changed parent, means that the program died,
possibly during a request. Then every container labelled with OWNER and RUN is removed, with retries, because the engine
may be restarting; after "n" a single attempt is made.

At its own start it removes the containers of owners that died together with their companions.
"""

import json
import os
import select
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from openenv_core.errors import OpenEnvError
from openenv_core.providers.docker.attach import EngineAddress
from openenv_core.providers.docker.engine import DockerEngine

LABEL = "ropewalk.owner"
"""Label of all our containers: `<boot>-<process namespace>-<pid>-<start time>` of the owner."""

RUN = "ropewalk.run"
"""Distinguishes a program's containers from those of an earlier program in the same process (before exec)."""

UNKNOWN = "0"

PARENT_CHECK_INTERVAL_S = 0.5
"""A fork of the program may hold the pipe open after the program's death, so the parent is polled too."""

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.25
"""Range of the pauses between attempts, which grow."""

QUIET_PERIOD_S = 5.0
"""How long no container must be found after a death: the engine may still process the program's last request."""

SEARCH_TIMEOUTS_S = {b"": 600.0, b"q": 20.0, b"n": 0.0}
"""When to give up on an engine that does not come back, by the message. The next owner's companion removes the rest."""

MAX_CONCURRENT_REMOVALS = 8

STALE_CONTAINER_AGE_S = 600.0
"""Minimum age of a stopped container to be removed if it is unknown whether its owner is alive."""


class OwnerProcess(NamedTuple):
    """Identifies a process. The pid alone is not unique across boots and namespaces."""

    boot: str
    namespace: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.boot}-{self.namespace}-{self.pid}-{self.start}"


def owner(pid: int | None = None) -> OwnerProcess:
    """Return the identity of a process on this machine, by default this one."""
    pid = os.getpid() if pid is None else pid
    return OwnerProcess(_boot(), _namespace(), pid, _start(pid) or UNKNOWN)


def parse(text: str) -> OwnerProcess | None:
    """Parse a label's value; return None if it is not ours."""
    parts = text.rsplit("-", 3)
    if len(parts) != 4 or not parts[2].isdigit():
        return None
    return OwnerProcess(parts[0], parts[1], int(parts[2]), parts[3])


def is_gone(other: OwnerProcess) -> bool | None:
    """Whether the process has ended; None if that cannot be determined from here."""
    if other.boot != _boot() or other.namespace != _namespace():
        return None
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OverflowError:
        return None
    except PermissionError:
        pass  # exists, but belongs to another user
    start = _start(other.pid)
    return start == "" if start is None or start == "" else UNKNOWN != other.start != start


def _start(pid: int) -> str | None:
    """Return a process's start time; "" for a zombie, None if unknown."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        # The program's name, in parentheses, may contain anything.
        fields = file.read().rpartition(b")")[2].split()
        return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    return None


def _boot() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return f"{uuid.getnode():012x}"


def _namespace() -> str:
    with suppress(OSError):
        return "".join(each for each in os.readlink("/proc/self/ns/pid") if each.isdigit())
    return UNKNOWN


def main(arguments: list[str]) -> int:
    """Wait for the owner's end, remove its containers, and return 0 when none is left."""
    address, label, run = arguments
    engine = DockerEngine(EngineAddress(*json.loads(address)))
    owner = parse(label)
    assert owner is not None
    # This process must outlive signals to the terminal's processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=sweep, args=(engine, owner), daemon=True).start()
    message = read_last_message(owner.pid)
    ours = f"{LABEL}={label}", f"{RUN}={run}"
    return clean(engine, ours, 0.0 if message else QUIET_PERIOD_S, SEARCH_TIMEOUTS_S[message])


def read_last_message(owner: int) -> bytes:
    """Wait for the owner's last message; return b"" if it died."""
    while True:
        alive = os.getppid() == owner
        # Read a message even after the owner's end, which does not wait for a companion that is still starting.
        if select.select([0], [], [], PARENT_CHECK_INTERVAL_S if alive else 0)[0]:
            return os.read(0, 1)
        if not alive:
            return b""


def clean(engine: DockerEngine, labels: Sequence[str], quiet_s: float, search_timeout_s: float) -> int:
    """Remove an owner's containers until none was found for `quiet_s`; return 0 then, or 1 at the timeout."""
    begin = last = time.monotonic()
    pause = MIN_BACKOFF_S
    while True:
        try:
            containers = engine.list_labelled(*labels)
        except OpenEnvError:
            last = time.monotonic()
        else:
            if containers:
                remove(engine, (str(each["Id"]) for each in containers))
                last, pause = time.monotonic(), MIN_BACKOFF_S
            elif time.monotonic() - last >= quiet_s:
                return 0
        if time.monotonic() - begin >= search_timeout_s:
            return 1
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_BACKOFF_S)


def sweep(engine: DockerEngine, own: OwnerProcess) -> None:
    """Remove the containers of dead owners. Does nothing if the engine is unavailable."""
    with suppress(OpenEnvError):
        containers = engine.list_labelled(LABEL)
        remove(engine, [str(each["Id"]) for each in containers if is_orphaned(each, own, engine.address)])


def is_orphaned(container: dict[str, Any], own: OwnerProcess, address: EngineAddress) -> bool:
    """Whether nobody else will remove a container: its owner is gone, or presumed gone (see below)."""
    owner = parse(str(container["Labels"][LABEL]))
    if owner is None or owner == own:
        return False
    gone = is_gone(owner)
    if gone is not None:
        return gone
    # The owner is from an earlier boot, another namespace or another machine. After a reboot of the engine's machine
    # its containers are stopped.
    stopped = container.get("State") not in ("running", "paused", "restarting")
    return (
        stopped
        and owner.boot != own.boot
        and urlsplit(address.url).scheme == "unix"
        and time.time() - float(container["Created"]) > STALE_CONTAINER_AGE_S
    )


def remove(engine: DockerEngine, containers: Iterable[str]) -> None:
    """Remove containers, several at a time. Errors are ignored, because callers check again."""

    def remove_one(container: str) -> None:
        with suppress(OpenEnvError):
            engine.remove(container)

    with ThreadPoolExecutor(MAX_CONCURRENT_REMOVALS) as pool:
        list(pool.map(remove_one, containers))
