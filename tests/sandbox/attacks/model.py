"""What an attack is: code for a session, and in which way it has to fail."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any, Final

from openenv_core.sandbox import Execution, Isolation, Limits, SandboxSession

STRONG: Final = frozenset({Isolation.NAMESPACES, Isolation.LSM})
"""Where nearly everything has to be contained."""

FILTERED: Final = STRONG | {Isolation.SECCOMP}
"""Where the system-call filter is enough."""

EVERYWHERE: Final = FILTERED | {Isolation.PROCESS}
"""Where limits and time-outs are enough."""

LIMITS: Final = Limits(
    timeout_s=20.0,
    grace_s=0.1,
    memory_bytes=96 << 20,
    output_hard_bytes=4 << 20,
    file_bytes=8 << 20,
    disk_bytes=16 << 20,
    files=512,
    processes=16,
)
"""Of a session that is attacked from, unless the attack says otherwise: small, so that reaching them takes no time."""


class Stage:
    """What an attack is played on: its own session, others that it opens, and what is told of the machine."""

    def __init__(
        self,
        session: SandboxSession,
        open_session: Callable[[], Awaitable[SandboxSession]],
        host: Mapping[str, Any],
    ) -> None:
        self.session = session
        self.open_session = open_session
        self.host = host
        self.breaches: list[str] = []
        self.executions: list[Execution] = []

    async def run(
        self, code: str, *, timeout_s: float = 10.0, session: SandboxSession | None = None
    ) -> Execution:
        """Run code, the attack's tools included, in the attacker's session or another."""
        done = await (session or self.session).execute(with_tools(code, self.host), timeout_s=timeout_s)
        self.executions.append(done)
        return done


Act = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack.

    Attributes:
        name: Unique in its category.
        contained: What it means that it failed.
        cells: Run one after the other; `attempt`, `breach`, `syscall` and `HOST` are there.
        act: In place of cells, where the attack has another side outside of the session.
        ends: How the last cell may end.
        survives: Whether the interpreter lives on: True, False, or None for either.
        holds: The levels at which it has to fail.
        timeout_s: Of each cell.
        limits: Of the session.
        snapshot: Whether the session keeps snapshots.
        machine: The only architecture that it is written for; None: any.
        slow: Takes seconds even when it fails; only in the third tier.
        alone: Fills a disk that sessions share at the lower levels; others beside it would fail of that.
    """

    name: str
    contained: str
    cells: Sequence[str] = ()
    act: Act | None = None
    ends: Sequence[str] = ("ok",)
    survives: bool | None = True
    holds: frozenset[Isolation]
    timeout_s: float = 10.0
    limits: Limits = LIMITS
    snapshot: bool = False
    machine: str | None = None
    slow: bool = False
    alone: bool = False
    category: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """Category and name."""
        return f"{self.category}/{self.name}"


def attacks_held_at(levels: frozenset[Isolation], **usual: Any) -> Callable[..., Callable[..., Attack]]:
    """Return what makes attacks that fail at these levels: `attack(name, contained, ...)(cells or act)`.

    `ends` are words in one string. An interpreter survives unless one of them ends it, and does not where its death is
    the only one. `usual` is what the attacks of one module have in common.
    """

    def attack(name: str, contained: str, **more: Any) -> Callable[..., Attack]:
        more = {**usual, **more}
        ends = tuple(more.pop("ends", "ok").split())
        deadly = {"killed", "timeout", "output_limit"}.intersection(ends)
        survives = False if ends == ("killed",) else None if deadly else True

        def by(*how: str | Act) -> Attack:
            cells = tuple(each for each in how if isinstance(each, str))
            act = next((each for each in how if not isinstance(each, str)), None)
            given = {"holds": levels, "survives": survives, **more}
            return Attack(name=name, contained=contained, cells=cells, act=act, ends=ends, **given)

        return by

    return attack


MARK: Final = "BREACH:"
"""What code prints when something has succeeded that must not."""

_TOOLS: Final = """
import ctypes, errno, json, os, signal, socket, sys, threading, time

HOST = json.loads({host!r})
CALLS = HOST["calls"]
_libc = ctypes.CDLL(None, use_errno=True)


def breach(*what):
    os.write(1, ("\\n{mark} " + " ".join(map(str, what)) + "\\n").encode("utf-8", "replace"))


def attempt(function, *args):
    try:
        return function(*args)
    except Exception:
        return None


def must_fail(what, function, *args):
    try:
        got = function(*args)
    except Exception:
        return
    breach(what, "did not fail:", repr(got)[:200])


def syscall(name, *args):
    number = CALLS[name] if isinstance(name, str) else name
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in args]
    _libc.syscall.restype = ctypes.c_long
    result = _libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
"""


def with_tools(code: str, host: Mapping[str, Any]) -> str:
    """Return code with what attacks have in common in front of it."""
    return _TOOLS.format(host=json.dumps(host), mark=MARK) + dedent(code)
