"""One replica of the policy: an engine, and where its weights come from."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rl_bridge.errors import WeightsError
from rl_bridge.generator.async_engine import AsyncVllmEngine
from rl_bridge.generator.checkpoint import Checkpoint
from rl_bridge.generator.endpoint import EndpointEngine
from rl_bridge.generator.engine import LoadFigures, VllmEngine
from rl_bridge.generator.settings import EngineSettings
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings
from rl_bridge.weights.assembly import without_data

if TYPE_CHECKING:
    from rl_bridge.weights.store import WeightStore


class Engine(Protocol):
    """Answers prompts on threads or in processes of its own; see `VllmEngine` for what each method promises."""

    @property
    def version(self) -> PolicyVersion:
        """The weights that it samples from."""

    @property
    def ended(self) -> "Future[None]":
        """Done when it is no more: with None after `close`, otherwise with what it died of."""

    def start(self) -> "Future[None]":
        """Begin loading; the future is done when it can answer, or has failed."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None = None
    ) -> "Future[list[Completion]]":
        """Answer prompts, in order. Cancelling the future ends the work on them."""

    def load(self, version: PolicyVersion, state: Mapping[str, Tensor]) -> "Future[LoadFigures]":
        """Take new weights."""

    def check(self) -> None:
        """Look whether it works; raises GeneratorError where it does not."""

    def close(self) -> None:
        """End it. What is under way fails."""


def make_engine(settings: EngineSettings) -> Engine:
    """An engine of the kind that the settings name, not started yet."""
    if settings.engine == "openai":
        return EndpointEngine(settings)
    if settings.engine == "vllm_async":
        return AsyncVllmEngine(settings)
    return VllmEngine(settings)


INITIAL: PolicyVersion = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateFigures:
    """What taking new weights cost.

    Attributes:
        version: Served from now on.
        transport_s: Seconds until the tensors were there, while answers were generated as ever.
        pause_s: Seconds in which no new prompt was begun.
        load_s: Of these, seconds in which the engine replaced its weights and generated nothing at all.
    """

    version: PolicyVersion
    transport_s: float
    pause_s: float
    load_s: float


class PolicyReplica:
    """Answers prompts, and serves the version that it is told to.

    Args:
        settings: What the engine is started with.
        store: Where versions after the first are found; None for a policy that is never trained.
    """

    def __init__(self, settings: EngineSettings, store: "WeightStore | None" = None) -> None:
        self._settings = settings
        self._store = store
        self._checkpoint = Checkpoint(settings.model_path)
        self._engine = make_engine(settings)
        # Where this process has the engine's weights, parts of tensors are joined beside them.
        self._device = "cuda" if settings.engine == "vllm" and torch.cuda.is_available() else "cpu"
        self._updates = asyncio.Lock()

    @property
    def ended(self) -> "Future[None]":
        """Done when the engine is no more: with None after `close`, otherwise with what it died of."""
        return self._engine.ended

    async def setup(self) -> None:
        """Load the engine; returns when it can answer.

        Raises:
            MissingDependencyError: vLLM is not installed.
            GeneratorError: The engine cannot start.
        """
        await asyncio.wrap_future(self._engine.start())

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings | None = None, seed: int | None = None
    ) -> Completion:
        """Answer one prompt; see `generate_many`."""
        seeds = None if seed is None else [seed]
        (completion,) = await self.generate_many([prompt], sampling, seeds)
        return completion

    async def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Answer prompts, in order.

        Args:
            prompts: Token ids.
            sampling: How to sample; None as the settings say.
            seeds: One a prompt, which decides its answer; None draws.

        Raises:
            PromptRefusedError: The engine does not take one of the prompts; it works on none of them.
            GeneratorError: The engine failed, refused, or did not answer in time.
        """
        sampling = sampling or self._settings.sampling
        return await asyncio.wrap_future(self._engine.generate(prompts, sampling, seeds))

    async def update_weights(self, version: PolicyVersion) -> UpdateFigures:
        """Take a version: the first from the checkpoint, the others from the store. One at a time, in order.

        Raises:
            WeightsError: The store does not have it, it is not of this model, or the engine is a server, which takes
                none; the weights are as before.
            GeneratorError: The engine failed.
        """
        async with self._updates:
            began = time.monotonic()
            if version == INITIAL:
                if self._engine.version == INITIAL:
                    return UpdateFigures(version=version, transport_s=0.0, pause_s=0.0, load_s=0.0)
                return await self._load(version, await asyncio.to_thread(self._checkpoint.tensors), began)
            if self._settings.endpoint is not None:
                return await self._load(version, {}, began)  # which refuses, before a store is asked
            if self._store is None:
                raise WeightsError(f"expected a store of weights to take version {version} from, got none")
            async with self._store.open(version, device=self._device) as state:
                self._checkpoint.require_like(without_data(state))
                return await self._load(version, state, began)

    async def _load(self, version: PolicyVersion, state: Mapping[str, Tensor], began: float) -> UpdateFigures:
        transport_s = time.monotonic() - began
        loading = asyncio.wrap_future(self._engine.load(version, state))
        try:
            figures = await asyncio.shield(loading)
        except asyncio.CancelledError:
            await asyncio.wait({loading})  # the engine reads what our caller would give back
            raise
        return UpdateFigures(
            version=version,
            transport_s=transport_s + figures.handover_s,
            pause_s=figures.pause_s,
            load_s=figures.load_s,
        )

    def version(self) -> PolicyVersion:
        """The version being served."""
        return self._engine.version

    def health(self) -> None:
        """Look whether the engine works.

        Raises:
            GeneratorError: It does not.
        """
        self._engine.check()

    async def close(self) -> None:
        """End the engine. What is under way fails."""
        await asyncio.to_thread(self._engine.close)
