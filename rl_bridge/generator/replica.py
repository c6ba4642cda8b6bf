"""One replica of the policy: an engine and the source of its weights."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_bridge.config import Config
from rl_bridge.devices import own_device
from rl_bridge.errors import ModelError, WeightsError
from rl_bridge.generator.base import UpdateMetrics
from rl_bridge.generator.engine import VllmEngine
from rl_bridge.generator.vllm_api import import_engine
from rl_bridge.metrics.spans import log_phase
from rl_bridge.services.own_process import GpuLock
from rl_bridge.titan.architecture import read_hf_config
from rl_bridge.types import PolicyVersion
from rl_bridge.weights.assembly import without_data

if TYPE_CHECKING:
    from rl_bridge.weights.store import WeightStore


def make_engine(config: Config, model_path: str | Path, *, seed: int | None = None) -> VllmEngine:
    """Make the engine that `generator.engine` names, not started yet; `seed` defaults to the run's."""
    own_process = config.generator.engine == "vllm_async"
    if config.generator.engine == "auto":
        own_process = own_device().type == "cuda" and config.generator.tensor_parallel == 1
    return VllmEngine(
        config, str(model_path), seed=config.seed if seed is None else seed, own_process=own_process
    )


INITIAL_VERSION: PolicyVersion = 0


class PolicyReplica:
    """An engine with the version of the weights set by `update_weights`; without a store, the checkpoint's.

    With the lock of a GPU shared with a trainer, it starts asleep and loads weights once it holds the lock.
    """

    def __init__(
        self,
        config: Config,
        model_path: str | Path,
        store: "WeightStore | None" = None,
        *,
        gpu_lock: GpuLock | None = None,
        seed: int | None = None,
    ) -> None:
        self._config = config
        self._gpu_lock = gpu_lock
        self._store = store
        self._checkpoint = Checkpoint(model_path)
        self.engine = make_engine(config, model_path, seed=seed)
        # If this process holds the engine's weights, tensors are assembled from their parts on the same device.
        self._device = "cuda" if self.engine.holds_weights and torch.cuda.is_available() else "cpu"
        self._updates = asyncio.Lock()

    async def setup(self) -> None:
        """Load the engine; returns when it can generate."""
        if self._gpu_lock is not None:
            # This part of the start needs no GPU, so others can compute meanwhile.
            with log_phase("importing vLLM"):
                await asyncio.to_thread(import_engine)
            with log_phase("waiting for a turn on the GPU"):
                await self._gpu_lock.acquire(self._config.trainer.timeout_s)
        with log_phase("starting the engine"):
            await asyncio.wrap_future(self.engine.start())
        if self._gpu_lock is not None:
            with log_phase("putting the engine to sleep"):
                await self.sleep()

    async def sleep(self) -> None:
        """Free the GPU for the trainer, until the next `update_weights`."""
        async with self._updates:
            await asyncio.shield(asyncio.wrap_future(self.engine.sleep()))
            if self._gpu_lock is not None:
                self._gpu_lock.release()

    async def update_weights(self, version: PolicyVersion) -> UpdateMetrics:
        """Load a version: the initial one from the checkpoint, others from the store. One at a time, in order.

        Raises:
            WeightsError: The store does not have it, it does not fit the model, or the engine is a remote server; the
                weights are unchanged.
            GeneratorError: The engine failed.
            RoleError: The lock of the GPU was not available in time.
        """
        async with self._updates:
            began = time.monotonic()
            if self._gpu_lock is None or self._gpu_lock.held:
                return await self._load_version(version, began)
            await self._gpu_lock.acquire(self._config.trainer.timeout_s)
            try:
                return await self._load_version(version, began)
            except WeightsError:  # it stays asleep, and the trainer needs the lock to publish weights
                self._gpu_lock.release()
                raise

    async def load_checkpoint(self, path: str | Path, version: PolicyVersion) -> UpdateMetrics:
        """Load the weights of another folder of the same model; its tokens report `version`, of the caller's choice.

        Raises:
            ModelError: The folder has no weights that can be read.
            WeightsError: They do not fit the model; the weights are unchanged.
            GeneratorError: The engine failed.
        """
        async with self._updates:
            began = time.monotonic()
            state = await asyncio.to_thread(Checkpoint(path).tensors)
            self._checkpoint.require_same_shapes(state)
            return await self._load(version, state, began)

    async def _load_version(self, version: PolicyVersion, began: float) -> UpdateMetrics:
        if version == INITIAL_VERSION:
            if self.engine.version == INITIAL_VERSION and self._gpu_lock is not None:
                return await self._load(version, None, began)
            if self.engine.version == INITIAL_VERSION:
                return UpdateMetrics(version=version)
            # With adapters, the engine's own weights are still the initial ones.
            adapters = self._config.pushed_adapter is not None
            initial_weights = {} if adapters else await asyncio.to_thread(self._checkpoint.tensors)
            return await self._load(version, initial_weights, began)
        if self._store is None:
            raise WeightsError(f"expected a store of weights to take version {version} from, got none")
        async with self._store.open(version, device=self._device) as state:
            if self._config.pushed_adapter is None:
                self._checkpoint.require_same_shapes(without_data(state))
            return await self._load(version, state, began)

    async def _load(
        self, version: PolicyVersion, state: Mapping[str, Tensor] | None, began: float
    ) -> UpdateMetrics:
        transport_s = time.monotonic() - began
        load = asyncio.wrap_future(self.engine.load(version, state))
        try:
            metrics = await asyncio.shield(load)
        except asyncio.CancelledError:
            await asyncio.wait({load})  # the engine still reads tensors that the caller would release
            raise
        return replace(metrics, transport_s=transport_s + metrics.transport_s)

    async def close(self) -> None:
        """Close the engine. Requests in progress fail."""
        await asyncio.to_thread(self.engine.close)


OUTPUT_LAYER = "lm_head.weight"


class Checkpoint:
    """The tensors of a folder in the Hugging Face layout, whose weights are in `*.safetensors`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Read all weights."""
        return {name: tensors_file.get_tensor(name) for name, tensors_file in self._iterate_weights()}

    def require_same_shapes(self, state: Mapping[str, Tensor]) -> None:
        """Raise WeightsError unless a state dict has every tensor of the checkpoint, in its shape.

        vLLM only logs missing weights and goes on with the old ones, and notices wrong shapes when some tensors have
        been replaced already.
        """
        if self._shapes is None:
            self._shapes = {
                name: tuple(tensors_file.get_slice(name).get_shape())
                for name, tensors_file in self._iterate_weights()
            }
            # With tied embeddings some files hold the output layer a second time; the trainer never sends it.
            if read_hf_config(self._path).get("tie_word_embeddings"):
                self._shapes.pop(OUTPUT_LAYER, None)
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

    def _iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield each tensor's name with the open file that holds it."""
        files = sorted(self._path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"expected weights in *.safetensors at {str(self._path)!r}, found none")
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors_file:
                    for name in tensors_file.keys():  # noqa: SIM118 - not a mapping
                        yield name, tensors_file
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read the weights in {str(file)!r}: {error}") from error
