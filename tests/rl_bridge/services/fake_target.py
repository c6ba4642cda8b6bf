"""A replica that is no process."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rl_bridge.services.balancer import TargetGoneError


class FakeTarget:
    """Notes its calls; hangs, dies or raises where told to."""

    def __init__(self, replica: int, incarnation: int = 1) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gone = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()
        self.error: Exception | None = None

    async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        self.calls.append((name, args))
        await self.released.wait()
        if self.gone.is_set():
            raise TargetGoneError("killed")
        if self.error is not None:
            raise self.error
        return self.replica

    def first_rank(self) -> "FakeTarget":
        return self

    def hold(self) -> None:
        self.released.clear()

    def die(self) -> None:
        self.gone.set()
        self.released.set()
