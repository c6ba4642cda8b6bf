"""Removes a program's containers when the program is gone, however it ended.

    python sweeper.py URL CERTIFICATES VERIFY OWNER RUN

Its standard input is a pipe whose other end only the program holds. One byte on it says that the program is done
and makes no more containers; "n", that it has none left that it knows of. The end of the pipe, or another parent,
says that it died, perhaps with a request under way. Every container that is labelled with OWNER and RUN is removed,
however often that takes to ask: the engine may be starting again. Where there should be none one look is enough.

At its own start it removes what is left of owners that ended together with their companions.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING or __package__:
    from openenv_core.providers.docker import _wire
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import _wire

LABEL = "ropewalk.owner"
"""The label of every container that is ours: `<boot>-<process namespace>-<pid>-<start time>` of its owner."""

RUN = "ropewalk.run"
"""Tells a program's containers from those of the program that was the same process before it."""

UNKNOWN = "0"

PARENT_CHECK_INTERVAL_S = 0.5
"""A fork of the program may hold the pipe open after the program's death, so the parent is looked at too."""

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.25
"""Pauses between two looks; they grow."""

QUIET_PERIOD_S = 5.0
"""How long after a death there must have been none: the engine may still be at the dead program's last request."""

SEARCH_TIMEOUT_S = 600.0
"""When an engine that does not come back is given up. The next owner's companion finds what is left."""

NOTHING_LEFT = b"n"

CALL_TIMEOUT_S = 30.0
MAX_CONCURRENT_REMOVALS = 8

STALE_CONTAINER_AGE_S = 600.0
"""How old a stopped container must be to be removed when its owner's fate cannot be told."""


class OwnerProcess(NamedTuple):
    """A process. Its number alone says little: another boot or namespace has the same numbers."""

    boot: str
    namespace: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.boot}-{self.namespace}-{self.pid}-{self.start}"


def owner(pid: int | None = None) -> OwnerProcess:
    """Return a process of this machine as an owner, by default this one."""
    pid = os.getpid() if pid is None else pid
    return OwnerProcess(_boot(), _namespace(), pid, _start(pid) or UNKNOWN)


def parse(text: str) -> OwnerProcess | None:
    """Return the owner that a label names, None for a label that is not ours."""
    parts = text.rsplit("-", 3)
    if len(parts) != 4 or not parts[2].isdigit():
        return None
    return OwnerProcess(parts[0], parts[1], int(parts[2]), parts[3])


def is_gone(other: OwnerProcess) -> bool | None:
    """Whether the process has ended; None where that cannot be told from here."""
    if other.boot != _boot() or other.namespace != _namespace():
        return None
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OverflowError:
        return None
    except PermissionError:
        pass  # another user's: it is there
    start = _start(other.pid)
    return start == "" if start is None or start == "" else UNKNOWN != other.start != start


def _start(pid: int) -> str | None:
    """Return when a process started; "" for one that has ended but was not waited for, None if unknown."""
    with suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    if os.path.exists("/proc/self/stat"):
        return None
    with suppress(OSError, subprocess.SubprocessError):
        ps = ["ps", "-o", "lstart=", "-p", str(pid)]
        text = subprocess.run(ps, capture_output=True, text=True, timeout=5, check=True).stdout
        return "".join(each for each in text if each.isalnum()) or None
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
    url, certificates, verify, label, run = arguments
    address = _wire.EngineAddress(url, certificates or None, verify == "1")
    owner = parse(label)
    assert owner is not None
    # Its work begins when others are told to stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=sweep, args=(address, owner), daemon=True).start()
    message = read_last_message(owner.pid)
    ours = f"{LABEL}={label}", f"{RUN}={run}"
    return clean(
        address,
        ours,
        0.0 if message else QUIET_PERIOD_S,
        0.0 if message == NOTHING_LEFT else SEARCH_TIMEOUT_S,
    )


def read_last_message(owner: int) -> bytes:
    """Return what the owner says when it is done; nothing where it died."""
    while True:
        alive = os.getppid() == owner
        # What was said is there after an owner's end too, which does not wait for a companion that still starts.
        if select.select([0], [], [], PARENT_CHECK_INTERVAL_S if alive else 0)[0]:
            return os.read(0, 1)
        if not alive:
            return b""


def clean(
    address: _wire.EngineAddress, labels: Sequence[str], quiet_s: float, search_timeout_s: float
) -> int:
    """Remove an owner's containers until none has been there for a while."""
    begin = last = time.monotonic()
    pause = MIN_BACKOFF_S
    while True:
        try:
            containers = list_labelled(address, *labels)
        except _wire.CONNECTION_ERRORS:
            last = time.monotonic()
        else:
            if containers:
                remove(address, (str(each["Id"]) for each in containers))
                last, pause = time.monotonic(), MIN_BACKOFF_S
            elif time.monotonic() - last >= quiet_s:
                return 0
        if time.monotonic() - begin >= search_timeout_s:
            return 1
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_BACKOFF_S)


def sweep(address: _wire.EngineAddress, own: OwnerProcess) -> None:
    """Remove the containers of owners that are gone. An engine that is away has nothing to be swept."""
    with suppress(*_wire.CONNECTION_ERRORS):
        remove(
            address,
            [str(each["Id"]) for each in list_labelled(address, LABEL) if is_orphaned(each, own, address)],
        )


def is_orphaned(container: dict[str, Any], own: OwnerProcess, address: _wire.EngineAddress) -> bool:
    """Whether nobody will remove this container but us."""
    owner = parse(str(container["Labels"][LABEL]))
    if owner is None or owner == own:
        return False
    gone = is_gone(owner)
    if gone is not None:
        return gone
    # It began before this machine did, or in another namespace or on another machine. After a new start of the
    # engine's machine its containers do not run.
    stopped = container.get("State") not in ("running", "paused", "restarting")
    return (
        stopped
        and owner.boot != own.boot
        and urlsplit(address.url).scheme == "unix"
        and time.time() - float(container["Created"]) > STALE_CONTAINER_AGE_S
    )


def list_labelled(address: _wire.EngineAddress, *labels: str) -> list[dict[str, Any]]:
    """Return the containers that have these labels, stopped ones too."""
    query = {"all": True, "filters": {"label": list(labels)}}
    answer = _wire.call(address, "GET", "/containers/json", query=query, timeout_s=CALL_TIMEOUT_S)
    if answer.status != 200:
        raise ValueError(answer.text())
    containers: list[dict[str, Any]] = answer.json()
    return containers


def remove(address: _wire.EngineAddress, containers: Iterable[str]) -> None:
    """Remove containers, several at a time. Whoever asked looks again."""

    def remove_one(container: str) -> None:
        with suppress(*_wire.CONNECTION_ERRORS):
            query = {"force": True, "v": True}
            _wire.call(address, "DELETE", f"/containers/{container}", query=query, timeout_s=CALL_TIMEOUT_S)

    with ThreadPoolExecutor(MAX_CONCURRENT_REMOVALS) as pool:
        list(pool.map(remove_one, containers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
