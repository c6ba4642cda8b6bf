"""The field's pseudocode runs as it is written, names and all: real generators, trainer, reward pool, dataset."""

import asyncio
import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

GROUP_SIZE = 4
BATCH_SIZE = 2
STEPS = 3
PROMPT = "You hold 10, 7 (17). The dealer shows 7. Hit or stand?"


def compute_reward(prompt: object, response: str, target: str) -> float:
    """More for the answer that was asked for, a little for a short one: siblings differ."""
    return float(response.strip() == target) + len(response) / 100


async def test_pseudocode(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_bridge.buffer.batch import TrainBatch
    from rl_bridge.buffer.ledger import Ledger
    from rl_bridge.buffer.replay import Admission, ReplayBuffer
    from rl_bridge.config import (
        Config,
        DataConfig,
        RewardConfig,
        RolloutConfig,
        TrainerConfig,
    )
    from rl_bridge.data.actor import DatasetActor
    from rl_bridge.generator.actor import PolicyActor
    from rl_bridge.generator.vllm_api import ONE_THREAD
    from rl_bridge.rewards.actor import RewardActor
    from rl_bridge.rollout.groups import training_samples
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.handle import LocalService
    from rl_bridge.tokens.chat import ChatTokenizer
    from rl_bridge.trainer.actor import TrainerActor
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.types import Ending, Group, Trajectory, Turn
    from rl_bridge.weights import WeightStore

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    examples = tmp_path / "examples.jsonl"
    examples.write_text("".join(json.dumps({"prompt": PROMPT, "target": "stand"}) + "\n" for _ in range(4)))
    tokenizer = ChatTokenizer(tiny_policy)
    config = Config(
        rollout=RolloutConfig(max_length=64, max_new_tokens=2, max_num_seqs=16, kv_cache_mb=64),
        trainer=TrainerConfig(iterations=STEPS, learning_rate=1e-2, checkpoint_interval=0),
    )
    training = TrainerSettings(
        config=config, model_path=str(tiny_policy), folder=str(tmp_path / "run"), max_loss_tokens=2
    )
    async with Fleet(tmp_path / "logs"):
        store = WeightStore.create()
        policy, trainer, reward, dataloader = await asyncio.gather(
            PolicyActor.as_service(config, tiny_policy, store),
            TrainerActor.options(environment=ONE_THREAD).as_service(training, store),
            RewardActor.as_service(RewardConfig(function="test_pseudocode.compute_reward", workers=1)),
            DatasetActor.as_service(DataConfig(source=str(examples)), 0),
        )
        buffer = ReplayBuffer(
            Ledger(max_losses=1),
            Admission(groups_per_batch=BATCH_SIZE, max_staleness=1, iterations=STEPS),
            timeout_s=60.0,
            straggler_timeout_s=60.0,
        )
        replay_buffer = LocalService(buffer)
        versions: list[int] = []

        async def continuous_rollouts() -> None:
            while True:
                example = await dataloader.sample.route()
                prompt = tokenizer.prompt(example.prompt)
                responses = await asyncio.gather(*(policy.generate.route(prompt) for _ in range(GROUP_SIZE)))
                trajectories = []
                for response in responses:
                    text = tokenizer.text(response.tokens)
                    score = await reward.evaluate_response.route(
                        prompt=example.prompt, response=text, target=example.target
                    )
                    turn = Turn(prompt=prompt, completion=response)
                    trajectories.append(
                        Trajectory(seed=0, turns=[turn], ending=Ending.COMPLETED, reward=score)
                    )
                await replay_buffer.add.route(Group(id=-1, seed=0, trajectories=trajectories))

        async def continuous_training() -> None:
            version = 0
            while version < STEPS:
                groups = await replay_buffer.sample.route(version, batch_size=BATCH_SIZE)
                versions.extend(version - group.version for group in groups)
                batch = TrainBatch.from_samples(training_samples(groups, normalize_std=True))
                await trainer.train_step.route(batch)
                version += 1
                await trainer.push_weights.route(version)
                await policy.update_weights.fanout(version)
                buffer.record_served(version)

        rollouts = asyncio.create_task(continuous_rollouts())
        try:
            async with asyncio.timeout(120):
                await continuous_training()
        finally:
            rollouts.cancel()
            await asyncio.gather(rollouts, return_exceptions=True)
        assert await policy.version.route() == STEPS
    assert len(versions) == STEPS * BATCH_SIZE
    assert set(versions) <= {0, 1}
