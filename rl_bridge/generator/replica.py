"""One replica of the policy: an engine, and where its weights come from."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_bridge.config import Config
from rl_bridge.devices import own_device
from rl_bridge.errors import ModelError, WeightsError
from rl_bridge.generator.base import Engine
from rl_bridge.generator.endpoint import EndpointEngine
from rl_bridge.generator.engine import VllmEngine
from rl_bridge.generator.vllm_api import EngineTotals, import_engine
from rl_bridge.metrics.spans import log_phase
from rl_bridge.services.options import Turn
from rl_bridge.titan.architecture import read_hf_config
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings
from rl_bridge.weights.assembly import without_data

if TYPE_CHECKING:
    from rl_bridge.weights.store import WeightStore


def make_engine(config: Config, model_path: str | Path, *, seed: int | None = None) -> Engine:
    """Make an engine of the kind that `generator.engine` names, not started yet; without a seed it has the run's."""
    if config.generator.engine == "openai":
        return EndpointEngine(config)
    apart = config.generator.engine == "vllm_async"
    if config.generator.engine == "auto":
        apart = own_device().type == "cuda" and config.generator.tensor_parallel == 1
    return VllmEngine(config, str(model_path), seed=config.seed if seed is None else seed, apart=apart)


INITIAL: PolicyVersion = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateMetrics:
    """What taking new weights cost.

    Attributes:
        transport_s: Seconds until the tensors were there, while answers were generated as ever.
        pause_s: Seconds in which no new prompt was begun.
        load_s: Of these, seconds in which the engine replaced its weights and generated nothing at all.
    """

    version: PolicyVersion
    transport_s: float
    pause_s: float
    load_s: float


class PolicyReplica:
    """Answers prompts, and serves the version that it is told to; without a store, the checkpoint's alone.

    With a turn on the GPU that is shared with a trainer it begins asleep, and takes weights when the turn is its own.
    """

    def __init__(
        self,
        config: Config,
        model_path: str | Path,
        store: "WeightStore | None" = None,
        *,
        turn: Turn | None = None,
        seed: int | None = None,
    ) -> None:
        self._config = config
        self._turn = turn
        self._store = store
        self._checkpoint = Checkpoint(model_path)
        self._engine = make_engine(config, model_path, seed=seed)
        # Where this process has the engine's weights, parts of tensors are joined beside them.
        in_process = isinstance(self._engine, VllmEngine) and self._engine.holds_weights
        self._device = "cuda" if in_process and torch.cuda.is_available() else "cpu"
        self._updates = asyncio.Lock()

    @property
    def ended(self) -> "Future[None]":
        """A future that is done when the engine has ended: with None after `close`, otherwise with its error."""
        return self._engine.ended

    async def setup(self) -> None:
        """Load the engine; returns when it can answer."""
        if self._turn is not None:
            # Others compute meanwhile: of the engine's start this much needs no GPU.
            with log_phase("importing vLLM"):
                await asyncio.to_thread(import_engine)
            with log_phase("waiting for a turn on the GPU"):
                await self._turn.take(self._config.trainer.timeout_s)
        with log_phase("starting the engine"):
            await asyncio.wrap_future(self._engine.start())
        if self._turn is not None:
            with log_phase("putting the engine to sleep"):
                await self.sleep()

    async def sleep(self) -> None:
        """Free the GPU for the trainer, until the next `update_weights`."""
        async with self._updates:
            await asyncio.shield(asyncio.wrap_future(self._engine.sleep()))
            if self._turn is not None:
                self._turn.give_back()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings | None = None, seed: int | None = None
    ) -> Completion:
        """Answer one prompt; see `generate_many`."""
        return (await self.generate_many([prompt], sampling, None if seed is None else [seed]))[0]

    async def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Answer prompts, in order; see `Engine.generate`. Without sampling settings those of `rollout` count."""
        rollout = self._config.rollout
        sampling = sampling or SamplingSettings(
            temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens
        )
        return await asyncio.wrap_future(self._engine.generate(prompts, sampling, seeds))

    async def update_weights(self, version: PolicyVersion) -> UpdateMetrics:
        """Take a version: the first from the checkpoint, the others from the store. One at a time, in order.

        Raises:
            WeightsError: The store does not have it, it is not of this model, or the engine is a server, which takes
                none; the weights are as before.
            GeneratorError: The engine failed.
            RoleError: The turn on the GPU did not come.
        """
        async with self._updates:
            began = time.monotonic()
            if self._turn is None or self._turn.held:
                return await self._take(version, began)
            await self._turn.take(self._config.trainer.timeout_s)
            try:
                return await self._take(version, began)
            except WeightsError:  # it sleeps on, and a trainer that has yet to bring weights needs the turn
                self._turn.give_back()
                raise

    async def _take(self, version: PolicyVersion, began: float) -> UpdateMetrics:
        if version == INITIAL:
            if self._engine.version == INITIAL and self._turn is not None:
                return await self._load(version, None, began)
            if self._engine.version == INITIAL:
                return UpdateMetrics(version=version, transport_s=0.0, pause_s=0.0, load_s=0.0)
            # With adapters the engine's own weights are still those.
            adapters = self._config.pushed_adapter is not None
            first = {} if adapters else await asyncio.to_thread(self._checkpoint.tensors)
            return await self._load(version, first, began)
        if self._config.generator.engine == "openai":
            return await self._load(version, {}, began)  # which refuses, before a store is asked
        if self._store is None:
            raise WeightsError(f"expected a store of weights to take version {version} from, got none")
        async with self._store.open(version, device=self._device) as state:
            if self._config.pushed_adapter is None:
                self._checkpoint.require_like(without_data(state))
            return await self._load(version, state, began)

    async def _load(
        self, version: PolicyVersion, state: Mapping[str, Tensor] | None, began: float
    ) -> UpdateMetrics:
        transport_s = time.monotonic() - began
        loading = asyncio.wrap_future(self._engine.load(version, state))
        try:
            metrics = await asyncio.shield(loading)
        except asyncio.CancelledError:
            await asyncio.wait({loading})  # the engine reads what our caller would give back
            raise
        return UpdateMetrics(
            version=version,
            transport_s=transport_s + metrics.handover_s,
            pause_s=metrics.pause_s,
            load_s=metrics.load_s,
        )

    def version(self) -> PolicyVersion:
        """The version being served."""
        return self._engine.version

    def statistics(self) -> EngineTotals | None:
        """What the engine has counted since it began; None of a server."""
        return None if self._engine.statistics is None else self._engine.statistics.totals

    def health(self) -> None:
        """Look whether the engine works."""
        self._engine.check()

    async def close(self) -> None:
        """Close the engine. Requests in progress fail."""
        await asyncio.to_thread(self._engine.close)


OUTPUT = "lm_head.weight"


class Checkpoint:
    """The tensors of a folder in the Hugging Face layout, whose weights are in `*.safetensors`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Read the weights."""
        return {name: opened.get_tensor(name) for name, opened in self._weights()}

    def require_like(self, state: Mapping[str, Tensor]) -> None:
        """Raise WeightsError unless a state dict has every tensor of the checkpoint, in its shape.

        vLLM only logs which weights it was not given, and goes on with the old ones; shapes it notices when some
        tensors have been replaced already.
        """
        if self._shapes is None:
            self._shapes = {
                name: tuple(opened.get_slice(name).get_shape()) for name, opened in self._weights()
            }
            # Where the output layer is the embedding some files have it a second time; no trainer sends it so.
            if read_hf_config(self._path).get("tie_word_embeddings"):
                self._shapes.pop(OUTPUT, None)
        missing = [name for name in self._shapes if name not in state]
        if missing:
            raise WeightsError(
                f"expected all {len(self._shapes)} tensors of the checkpoint at {str(self._path)!r}, "
                f"got {len(state)} without {', '.join(missing[:3])}"
            )
        for name, shape in self._shapes.items():
            if tuple(state[name].shape) != shape:
                raise WeightsError(
                    f"expected {name} of shape {list(shape)}, as in the checkpoint at {str(self._path)!r}, "
                    f"got {list(state[name].shape)}"
                )

    def _weights(self) -> Iterator[tuple[str, Any]]:
        """Each tensor's name, with the open file that it is in."""
        files = sorted(self._path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"expected weights in *.safetensors at {str(self._path)!r}, found none")
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - it is no mapping
                        yield name, opened
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read the weights in {str(file)!r}: {error}") from error
