"""Every system call by its number, with arguments that mean something to nearly each of them: for what no list names.

Nothing is expected of a call, only of the world around: it has to be the same afterwards.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from openenv_core.sandbox import Limits, Sandbox, SandboxSession, SandboxUnavailableError

from .model import with_tools
from .surroundings import Surroundings

LAST: Final = 600
PATTERNS: Final = (
    "(0, 0, 0, 0, 0, 0)",
    "(-1, -1, -1, -1, -1, -1)",
    "(text, text, text, text, text, text)",
    "(3, text, 64, 0, text, 64)",
    "(-100, path, 0o102, 0o777, 0, 0)",
    "(path, path, 0o777, 1, 1, 0)",
    "(1, HOST['victim'], 9, text, 0, 0)",
    "(HOST['victim'], 9, text, 64, 0, 0)",
    "(HOST['supervisor'], text, 8, text, 8, 0)",
    "(path, text, path, 0x1000, text, 0)",
    "(0x7E020011, 0, 0, 0, 0, 0)",
    "(1 << 62, 1 << 31, 1 << 63, 1 << 32, 7, 7)",
)

LIMITS: Final = Limits(
    timeout_s=20.0, grace_s=0.05, memory_bytes=64 << 20, disk_bytes=4 << 20, file_bytes=1 << 20, files=256
)

# Those that wait, for ever or until a signal comes, cost a time-out each: the sweep knows them to save time, and
# makes them all the same.
_SWEEP: Final = """
text = ctypes.create_string_buffer(b"/etc/passwd", 4096)
path = ctypes.create_string_buffer(HOST["writable"].encode(), 4096)
_libc.syscall.restype = ctypes.c_long


def sweep(begin, end, pattern):
    arguments = [ctypes.c_long(each) if isinstance(each, int) else each for each in eval(pattern)]
    for number in range(begin, end):
        os.write(2, b"%d " % number)
        _libc.syscall(ctypes.c_long(number), *arguments)
"""


@dataclass
class Swept:
    """What a sweep saw: how many calls it made, and what has changed outside."""

    calls: int = 0
    breaches: list[str] = field(default_factory=list)


async def sweep(sandbox: Sandbox, patterns: tuple[str, ...] = PATTERNS, *, patience_s: float = 0.2) -> Swept:
    """Make every call with each of the patterns, one session a pattern, all at the same time."""
    swept = Swept()
    async with Surroundings() as around:
        zygote = sandbox.zygote_pid
        host = around.host(zygote)

        async def one(pattern: str) -> None:
            session = await sandbox.open(LIMITS)
            try:
                await _sweep_one(session, with_tools(_SWEEP, host), pattern, patience_s, swept)
            finally:
                await session.close()

        await asyncio.gather(*map(one, patterns))
        swept.breaches += await asyncio.to_thread(around.damage)
        if sandbox.zygote_pid != zygote:
            swept.breaches.append("the zygote was ended")
    return swept


async def _sweep_one(
    session: SandboxSession, tools: str, pattern: str, patience_s: float, swept: Swept
) -> None:
    begin = 0
    while begin <= LAST:
        try:
            await session.restart()
        except SandboxUnavailableError as error:
            swept.breaches.append(f"after call {begin} with {pattern}: {error}")
            return
        ready = await session.execute(tools)
        if ready.status != "ok":
            swept.breaches.append(
                f"after call {begin} with {pattern}: {ready.status} {ready.reason} {ready.error}"
            )
            return
        # Within one life as far as it gets; a call that waits, or changes the interpreter, is the last one of it.
        done = await session.execute(f"sweep({begin}, {LAST + 1}, {pattern!r})", timeout_s=patience_s)
        if done.status == "sandbox_error":
            swept.breaches.append(f"{pattern}: {done.reason}")
        made = [int(word) for word in done.stderr.split() if word.isdecimal()]
        reached = max((number for number in made if begin <= number <= LAST), default=begin)
        swept.calls += reached + 1 - begin
        # A time-out in between, of a sweep that only took its time, goes on at the same place.
        begin = reached + 1
