"""Removes a program's containers when the program is gone, whatever it died of.

    python _companion.py URL CERTIFICATES VERIFY OWNER RUN

Its standard input is a pipe whose other end only the program holds. One byte on it says that the program is done
and makes no more containers; "n", that it has none left that it knows of. The end of the pipe, or another parent,
says that it died, perhaps with a request under way. Every container that is labelled with OWNER and RUN is removed,
however often that takes to ask: the engine may be starting again. Where there should be none one look is enough.

At its own start it removes what is left of owners that ended together with their companions.
"""

import http.client
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openenv_core.providers.docker import _owner, _wire
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import _owner
    import _wire

PARENT_CHECK_INTERVAL_S = 0.5
"""A fork of the program may hold the pipe open after the program's death, so the parent is looked at too."""

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.25
"""Pauses between two looks; they grow."""

QUIET_PERIOD_S = 5.0
"""How long after a death there must have been none: the engine may still be at the dead program's last request."""

GIVE_UP_AFTER_S = 600.0
"""When an engine that does not come back is given up. The next owner's companion finds what is left."""

NOTHING_LEFT = b"n"

CALL_TIMEOUT_S = 30.0
AT_ONCE = 8

STALE_CONTAINER_AGE_S = 600.0
"""How old a stopped container must be to be removed when its owner's fate cannot be told."""

UNWELL = (OSError, http.client.HTTPException, ValueError)


def main(arguments: list[str]) -> int:
    """Wait for the owner's end, remove its containers, and return 0 when none is left."""
    url, certificates, verify, label, run = arguments
    address = _wire.EngineAddress(url, certificates or None, verify == "1")
    owner = _owner.parse(label)
    assert owner is not None
    # Its work begins when others are told to stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=sweep, args=(address, owner), daemon=True).start()
    said = last_word(owner.pid)
    ours = f"{_owner.LABEL}={label}", f"{_owner.RUN}={run}"
    return clean(
        address, ours, 0.0 if said else QUIET_PERIOD_S, 0.0 if said == NOTHING_LEFT else GIVE_UP_AFTER_S
    )


def last_word(owner: int) -> bytes:
    """Return what the owner says when it is done; nothing where it died."""
    while True:
        here = os.getppid() == owner
        # What was said is there after an owner's end too, which does not wait for a companion that still starts.
        if select.select([0], [], [], PARENT_CHECK_INTERVAL_S if here else 0)[0]:
            return os.read(0, 1)
        if not here:
            return b""


def clean(address: _wire.EngineAddress, labels: Sequence[str], quiet_s: float, give_up_s: float) -> int:
    """Remove an owner's containers until none has been there for a while."""
    begin = last = time.monotonic()
    pause = MIN_BACKOFF_S
    while True:
        try:
            found = labelled(address, *labels)
        except UNWELL:
            last = time.monotonic()
        else:
            if found:
                remove(address, (str(each["Id"]) for each in found))
                last, pause = time.monotonic(), MIN_BACKOFF_S
            elif time.monotonic() - last >= quiet_s:
                return 0
        if time.monotonic() - begin >= give_up_s:
            return 1
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_BACKOFF_S)


def sweep(address: _wire.EngineAddress, own: _owner.OwnerProcess) -> None:
    """Remove the containers of owners that are gone. An engine that is away has nothing to be swept."""
    with suppress(*UNWELL):
        remove(
            address,
            [str(each["Id"]) for each in labelled(address, _owner.LABEL) if orphaned(each, own, address)],
        )


def orphaned(container: dict[str, Any], own: _owner.OwnerProcess, address: _wire.EngineAddress) -> bool:
    """Whether nobody will remove this container but us."""
    owner = _owner.parse(str(container["Labels"][_owner.LABEL]))
    if owner is None or owner == own:
        return False
    gone = _owner.is_gone(owner)
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


def labelled(address: _wire.EngineAddress, *labels: str) -> list[dict[str, Any]]:
    """Return the containers that have these labels, stopped ones too."""
    query = {"all": True, "filters": {"label": list(labels)}}
    answer = _wire.call(address, "GET", "/containers/json", query=query, timeout_s=CALL_TIMEOUT_S)
    if answer.status != 200:
        raise ValueError(answer.text())
    found: list[dict[str, Any]] = answer.json()
    return found


def remove(address: _wire.EngineAddress, containers: Iterable[str]) -> None:
    """Remove containers, several at a time. Whoever asked looks again."""

    def one(container: str) -> None:
        with suppress(*UNWELL):
            query = {"force": True, "v": True}
            _wire.call(address, "DELETE", f"/containers/{container}", query=query, timeout_s=CALL_TIMEOUT_S)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, containers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
