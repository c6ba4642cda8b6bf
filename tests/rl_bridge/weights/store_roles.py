"""Actors for the tests of the store. Their roles' processes import them by this name."""

import asyncio
import os
import signal

import torch
from monarch.actor import Actor, concurrent_endpoint

from rl_bridge.weights import WeightStore


def state_of(value: float, *, size: int = 8) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size, 4), value), "bias": torch.full((3,), -value)}


class Publisher(Actor):
    def __init__(self, store: WeightStore) -> None:
        self._store = store

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def put(self, key: int | str, value: float, size: int = 8) -> None:
        await self._store.put(key, state_of(value, size=size))

    @concurrent_endpoint
    async def close(self) -> None:
        await self._store.close()


class Reader(Actor):
    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._let_go = asyncio.Event()

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def get(self, key: int | str) -> dict[str, torch.Tensor]:
        return await self._store.get(key)

    @concurrent_endpoint
    async def latest(self) -> int | None:
        return await self._store.latest()

    @concurrent_endpoint
    async def hold(self, key: int | str, killed: bool = False) -> set[float]:
        """Hold a snapshot until `let_go`, then tell the values in it."""
        async with self._store.open(key) as state:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            await self._let_go.wait()
            return {float(value) for tensor in state.values() for value in tensor.unique()}

    @concurrent_endpoint
    async def let_go(self) -> None:
        self._let_go.set()
