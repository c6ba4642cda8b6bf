"""What the tests of the generator share: settings, prompts, weights."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_bridge.generator.settings import EngineSettings

MAX_LENGTH = 32


def engine_settings(path: Path, **changes: Any) -> EngineSettings:
    settings: dict[str, Any] = {
        "model_path": str(path),
        "dtype": "float32",
        "max_length": MAX_LENGTH,
        "max_num_seqs": 64,
        "kv_cache_bytes": 32 << 20,
        "gpu_memory_utilization": 0.1,
        "seed": 0,
    }
    return EngineSettings(**settings | changes)


def prompts(count: int, length: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    drawn: list[list[int]] = torch.randint(3, 30, (count, length), generator=generator).tolist()
    return drawn


def perturbed(state: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()
    }


@asynccontextmanager
async def policy_service(
    path: Path, folder: Path, *, replicas: int = 1, threads: int = 1, actor: Any = None, **settings: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """A service of `PolicyActor`, and the store that it takes weights from."""
    from rl_bridge.generator.actor import PolicyActor
    from rl_bridge.generator.settings import engine_environment
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.restarts import RestartPolicy
    from rl_bridge.weights.store import WeightStore

    store = WeightStore.create()
    async with Fleet(folder / "logs"):
        policy = (
            await (actor or PolicyActor)
            .options(
                num_replicas=replicas,
                environment={**engine_environment(on_gpu=False), "OMP_NUM_THREADS": str(threads)},
                restarts=RestartPolicy(budget=10),
            )
            .as_service(engine_settings(path, **settings), store)
        )
        try:
            yield policy, store
        finally:
            await store.close()
