"""The generator as a Monarch actor."""

import asyncio
from collections.abc import Sequence

from monarch.actor import Actor, concurrent_endpoint

from rl_bridge.generator.engine import VllmEngine
from rl_bridge.generator.settings import EngineSettings
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings
from rl_bridge.weights import SnapshotHandle, read_snapshot


class GeneratorActor(Actor):
    """A thin shell around `VllmEngine`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = VllmEngine(settings)

    @concurrent_endpoint
    async def start(self) -> None:
        """Load the engine; returns when it can answer."""
        await asyncio.wrap_future(self._engine.start())

    @concurrent_endpoint
    async def generate(self, prompts: list[Sequence[int]], sampling: SamplingSettings) -> list[Completion]:
        """Answer a batch of prompts, in order."""
        return await asyncio.wrap_future(self._engine.generate(prompts, sampling))

    @concurrent_endpoint
    async def load(self, handle: SnapshotHandle) -> PolicyVersion:
        """Take the weights of a snapshot; returns the version now served."""
        state = await asyncio.to_thread(read_snapshot, handle)
        await asyncio.wrap_future(self._engine.load(handle.version, state))
        return handle.version

    @concurrent_endpoint
    async def close(self) -> None:
        """End the engine's thread."""
        await asyncio.to_thread(self._engine.close)
