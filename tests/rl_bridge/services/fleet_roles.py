"""An actor for the tests of the fleet. Its process imports it by this name."""

import asyncio
import os

from monarch.actor import concurrent_endpoint

from rl_bridge.services import ServiceActor


class Worker(ServiceActor):
    def __init__(self, number: int) -> None:
        self._number = number

    @concurrent_endpoint
    async def add(self, other: int) -> int:
        return self._number + other

    @concurrent_endpoint
    async def describe(self) -> int:
        print(f"I am {self._number}", flush=True)  # noqa: T201 - what is printed is looked for in the log
        return os.getpid()

    @concurrent_endpoint
    async def wait(self) -> None:
        await asyncio.sleep(600)
