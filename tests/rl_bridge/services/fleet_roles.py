"""An actor for the tests of the fleet. Its role's process imports it by this name."""

import asyncio
import os

from monarch.actor import Actor, endpoint

from rl_bridge.errors import TrainingError


class Worker(Actor):
    def __init__(self, number: int) -> None:
        self._number = number

    @endpoint
    async def add(self, other: int) -> int:
        return self._number + other

    @endpoint
    async def describe(self) -> tuple[int, str | None]:
        print(f"I am {self._number}", flush=True)  # noqa: T201 - what is printed is looked for in the log
        return os.getpid(), os.environ.get("ROPEWALK_TEST")

    @endpoint
    async def wait(self) -> None:
        await asyncio.sleep(600)

    @endpoint
    async def fail(self, ours: bool) -> None:
        if ours:
            raise TrainingError("the loss is strange")
        raise ZeroDivisionError("not one of ours")
