"""Generators answer from base and adapters as the trainer has them, sent merged or by themselves."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generator_fixtures import MAX_LENGTH, WAIT_S, prompts

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import Config, LoraConfig
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Completion, Ending, SamplingSettings, Trajectory, Turn
from rl_bridge.weights import WeightStore
from tests.rl_bridge.trainer.trainer_ranks import settings
from tests.rl_bridge.weights.store_stage import Directory

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300), pytest.mark.usefixtures("engine_environment")]

BAR = 1e-4
SAMPLING = SamplingSettings(temperature=0.8, max_new_tokens=6)


@pytest.fixture
def store() -> WeightStore:
    return WeightStore(Directory(), transport="shared_memory")


@pytest.mark.parametrize(
    ("engine", "push"),
    [
        ("vllm", "adapter"),
        pytest.param("vllm", "merged", marks=pytest.mark.soak),
        pytest.param("vllm_async", "merged", marks=pytest.mark.soak),
        pytest.param("vllm_async", "adapter", marks=pytest.mark.soak),
    ],
)
async def test_generators_sample_from_what_the_trainer_has_trained(
    long_policy: Path, tmp_path: Path, store: WeightStore, engine: str, push: str
) -> None:
    from rl_bridge.generator.replica import PolicyReplica
    from rl_bridge.trainer.trainer import Trainer

    lora = LoraConfig.model_validate({"rank": 3, "alpha": 12.0, "push": push})
    trainer = Trainer(
        settings(
            long_policy, folder=tmp_path, lora=lora, temperature=SAMPLING.temperature, learning_rate=0.05
        )
    )
    config = Config.model_validate(
        {
            "rollout": {"max_length": MAX_LENGTH, "max_num_seqs": 64, "kv_cache_mb": 32},
            "generator": {"engine": engine},
            "model": {"lora": lora},
        }
    )
    replica = PolicyReplica(config, long_policy, store)
    await replica.setup()
    batch_prompts = prompts(24)

    async def complete(sampling: SamplingSettings) -> list[Completion]:
        return await asyncio.wrap_future(replica.engine.generate(batch_prompts, sampling))

    async def played() -> tuple[TrainBatch, float]:
        answers = await complete(SAMPLING)
        samples = []
        for number, (prompt, answer) in enumerate(zip(batch_prompts, answers, strict=True)):
            turns = [Turn(prompt=prompt, completion=answer)]
            trajectory = Trajectory(seed=0, turns=turns, ending=Ending.COMPLETED, reward=0.0)
            samples += training_rows(trajectory, advantage=1.0 if number % 2 else -1.0, index=number)
        batch = TrainBatch.from_samples(samples)
        assert set(batch.versions) == {replica.engine.version}
        off = float(np.abs(trainer.logprobs(batch) - batch.old_logprobs).max())
        return batch, off

    async def push_version() -> None:
        with trainer.weights(trainer.version) as state:
            await store.put(trainer.version, state, dtype=torch.float32)
        await replica.update_weights(trainer.version)

    try:
        batch, off = await played()
        assert off <= BAR
        first = trainer.logprobs(batch)
        for _ in range(2):
            trainer.step(batch)
            await push_version()
            batch, off = await played()
            assert off <= BAR
        assert np.abs(first - first.mean()).max() > BAR
        greedy = SamplingSettings(temperature=0.0, max_new_tokens=6)
        adapted = [answer.tokens for answer in await complete(greedy)]
        assert await loaded_adapters(replica, engine) == ({2} if push == "adapter" else set())
        await replica.update_weights(0)  # as a run does that goes back to its beginning
        assert await loaded_adapters(replica, engine) == set()
        assert [answer.tokens for answer in await complete(greedy)] != adapted
        await replica.update_weights(2)
        assert [answer.tokens for answer in await complete(greedy)] == adapted
    finally:
        await replica.close()
        await store.close()


async def loaded_adapters(replica: Any, engine: str) -> set[int]:
    """The numbers of the adapters that an engine holds."""
    if not replica._config.pushed_adapter:
        return set()
    if engine == "vllm":
        return set(replica.engine._llm._engine.list_loras())
    listed = replica.engine._submit(replica.engine._llm.list_loras())
    return set(listed.result(WAIT_S))
