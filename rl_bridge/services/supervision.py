"""What Monarch reports of dead processes, told to whoever owns them."""

import asyncio
import os
import re
import secrets
import threading
from collections.abc import Callable
from typing import Any

from rl_bridge.errors import MissingDependencyError

try:
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
    from monarch.config import configure
except ModuleNotFoundError as missing:
    raise MissingDependencyError("torchmonarch") from missing

SILENT_BEATS = 10
MIN_SILENCE_S = 5.0
"""A machine under load answers late; that is no death."""

ENDED = "its process ended"
"""How the reason of a loss begins where a process is known to be dead, not only silent."""

OnReport = Callable[[str], None]

_POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"
_MARK = re.compile(r"rw[0-9a-f]{16}")
_DEATH = re.compile(r"the process this actor was running on failed: ([^\s)]+\)?)")

_lock = threading.Lock()
_watched: dict[str, tuple[asyncio.AbstractEventLoop, OnReport]] = {}
_others: dict[str, tuple[asyncio.AbstractEventLoop, OnReport]] = {}


def new_mark() -> str:
    """A word that names one start of something; in the names of its processes and actors."""
    return f"rw{secrets.token_hex(8)}"


def supervise(heartbeat_s: float) -> None:
    """Have Monarch report deaths here, look for them this often, and give up on who is silent.

    A process that is dead is noticed at the next look. One that does not answer, because it hangs or its host
    cannot be reached, is given up after `SILENT_BEATS` looks. Both hold for processes spawned from now on.
    """
    os.environ[_POLL] = f"{max(round(heartbeat_s * 1000), 1)}ms"
    reload_config_from_env()
    silence = f"{round(1000 * max(SILENT_BEATS * heartbeat_s, MIN_SILENCE_S))}ms"
    configure(get_proc_state_max_idle=silence, get_actor_state_max_idle=silence)
    # The hook stays: a dead process's report may still be on its way when its owner is gone, and Monarch's own
    # hook would turn it into a KeyboardInterrupt of whoever runs by then.
    monarch.actor.unhandled_fault_hook = _on_fault


def watch(mark: str, on_report: OnReport) -> None:
    """Call `on_report`, in this event loop, with every report that names `mark`, until `unwatch`."""
    with _lock:
        _watched[mark] = (asyncio.get_running_loop(), on_report)


def unwatch(mark: str) -> None:
    """Reports that name `mark` are of the past from now on."""
    with _lock:
        _watched.pop(mark, None)


def watch_others(owner: str, on_report: OnReport | None) -> None:
    """Call `on_report` with reports that name no mark at all; None ends that."""
    with _lock:
        if on_report is None:
            _others.pop(owner, None)
        else:
            _others[owner] = (asyncio.get_running_loop(), on_report)


def _on_fault(failure: Any) -> None:
    """Called by Monarch, on a thread of its own, when nobody else handled a failure."""
    report = " ".join(str(failure).split())
    # One death makes several reports, also of meshes that Monarch adds; all of them name the process by its
    # mark. One that names only what has ended comes late. One in an unforeseen form is everybody's.
    marks = set(_MARK.findall(report))
    if (death := _DEATH.search(report)) is not None:
        report = f"{ENDED}: {death[1]}"
    with _lock:
        told = [_watched[mark] for mark in marks if mark in _watched] if marks else list(_others.values())
    for loop, on_report in told:
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_report, report)
