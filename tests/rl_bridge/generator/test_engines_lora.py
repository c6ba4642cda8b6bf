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
        batch = rows_of(batch_prompts, await complete(SAMPLING))
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


ENDLESS = SamplingSettings(temperature=SAMPLING.temperature, max_new_tokens=480)
STALENESS = 2


async def test_answers_finish_with_the_adapters_that_they_began_with(
    long_policy: Path, tmp_path: Path, store: WeightStore
) -> None:
    """Each version's answers are still being sampled when the next versions come, up to as many as are held."""
    from rl_bridge.generator.replica import PolicyReplica
    from rl_bridge.trainer.trainer import Trainer

    lora = LoraConfig.model_validate({"rank": 3, "alpha": 12.0})
    trainers = [
        Trainer(
            settings(
                long_policy,
                folder=tmp_path / str(version),
                lora=lora,
                temperature=ENDLESS.temperature,
                learning_rate=0.05,
                max_length=512,
            )
        )
        for version in range(STALENESS + 3)
    ]
    config = Config.model_validate(
        {
            "rollout": {
                "max_length": 512,
                "max_num_seqs": 64,
                "kv_cache_mb": 64,
                "max_staleness": STALENESS,
            },
            "generator": {"engine": "vllm"},
            "model": {"lora": lora},
        }
    )
    assert config.rollout.weight_update == "continue"
    replica = PolicyReplica(config, long_policy, store)
    await replica.setup()
    first = prompts(4)
    calls: list[asyncio.Future[list[Completion]]] = []
    lessons = rows_of(first, await asyncio.wrap_future(replica.engine.generate(first, SAMPLING)))
    try:
        for version, trainer in enumerate(trainers):
            for _ in range(version):
                trainer.step(lessons)
            if version:
                with trainer.weights(version) as state:
                    await store.put(version, state, dtype=torch.float32)
            if version > STALENESS + 1:
                break
            if version:
                await replica.update_weights(version)
            calls.append(asyncio.wrap_future(replica.engine.generate(prompts(4 + version), ENDLESS)))
            await asyncio.sleep(0.02)
        # The first adapter has waited for the answers of the model without one. Of as many as are held, answers are in
        # progress; one more waits.
        assert [call.done() for call in calls] == [True, False, False, False]
        assert await loaded_adapters(replica, "vllm") == {1, 2, 3}
        await replica.update_weights(STALENESS + 2)
        assert calls[1].done()
        calls.append(asyncio.wrap_future(replica.engine.generate(prompts(9), ENDLESS)))
        for version, (call, trainer) in enumerate(zip(calls, trainers, strict=True)):
            answers = await call
            asked = prompts(9 if version > STALENESS + 1 else 4 + version)
            batch = rows_of(asked, answers)
            assert set(batch.versions) == {version}
            assert np.abs(trainer.logprobs(batch) - batch.old_logprobs).max() <= BAR
            other = trainers[version - 1].logprobs(batch)
            assert np.abs(other - batch.old_logprobs).max() > 100 * BAR
    finally:
        await replica.close()
        await store.close()


def rows_of(prompts: list[list[int]], answers: list[Completion]) -> TrainBatch:
    """The rows that answers are trained as."""
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        turns = [Turn(prompt=prompt, completion=answer)]
        trajectory = Trajectory(seed=0, turns=turns, ending=Ending.COMPLETED, reward=0.0)
        samples += training_rows(trajectory, advantage=1.0 if number % 2 else -1.0, index=number)
    return TrainBatch.from_samples(samples)
