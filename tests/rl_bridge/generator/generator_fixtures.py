"""Helpers for tests of the generator: settings, prompts, weights, and independently computed log-probabilities."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_bridge.config import Config
from rl_bridge.types import Completion

MAX_LENGTH = 32
WAIT_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


def engine_config(
    *, generator: Mapping[str, Any] | None = None, deterministic: bool = False, **rollout: Any
) -> Config:
    """A run's, of which an engine is made."""
    settings: dict[str, Any] = {"max_length": MAX_LENGTH, "max_num_seqs": 64, "kv_cache_mb": 32}
    return Config.model_validate(
        {"rollout": settings | rollout, "generator": generator or {}, "deterministic": deterministic}
    )


def be_patient(engine: Any, patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let an engine go without a token for so long."""
    patch.setattr(engine, "_rollout", engine._rollout.model_copy(update={"generate_timeout_s": seconds}))


def prompts(count: int, length: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    tokens: list[list[int]] = torch.randint(3, 30, (count, length), generator=generator).tolist()
    return tokens


def perturbed_weights(path: Path, *, seed: int) -> dict[str, Tensor]:
    """The weights of a checkpoint, moved at random."""
    from rl_bridge.generator.replica import Checkpoint

    state: Mapping[str, Tensor] = Checkpoint(path).tensors()
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()
    }


def logprobs(model: Any, prompt: Sequence[int], answer: Completion, temperature: float) -> list[float]:
    """Of an answer's tokens, as a model of transformers computes them."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0] / temperature
    distribution = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return distribution.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1).tolist()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def process_of(engine: Any) -> int:
    """The process of an asynchronous engine."""
    (process,) = engine._llm.engine_core.resources.engine_manager.processes
    pid: int = process.pid
    return pid


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@asynccontextmanager
async def policy_service(
    path: Path, folder: Path, *, replicas: int = 1, threads: int = 1, actor: Any = None, **rollout: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """A service of `PolicyActor`, and the store that it takes weights from."""
    from rl_bridge.generator.actor import PolicyActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.restarts import RestartPolicy
    from rl_bridge.weights.store import WeightStore

    store = WeightStore.create()
    async with Fleet(folder / "logs"):
        policy = (
            await (actor or PolicyActor)
            .options(
                num_replicas=replicas,
                environment={"OMP_NUM_THREADS": str(threads)},
                restarts=RestartPolicy(budget=10),
            )
            .as_service(engine_config(**rollout), path, store)
        )
        try:
            yield policy, store
        finally:
            await store.close()
