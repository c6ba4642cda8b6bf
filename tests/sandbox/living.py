"""What lives below a process, and waiting for what nobody tells of."""

import asyncio
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nobody tells of what is looked for
            await asyncio.sleep(0.02)


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    left = [pid]
    while left:
        below = children(left.pop())
        found.update(below)
        left += below
    return found
