"""Real roles account for their time: an engine, a trainer and workers that play a real environment."""

import asyncio
import os
from pathlib import Path

import pytest

from openenv_core import LocalProcessProvider

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

UNACCOUNTED = 0.02
WAIT_S = 240.0

CONFIG = {
    "env": {"app": "envs.blackjack_env.server.app:app", "sessions": 32},
    "rollout": {
        "task": "examples.grpo_blackjack.task:BlackjackTask",
        "max_new_tokens": 1,
        "max_length": 32,
        "max_num_seqs": 64,
    },
}


@pytest.fixture(autouse=True)
def _roles_import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))


async def test_engine_trainer_and_workers_account_for_their_time(tiny_policy: Path, tmp_path: Path) -> None:
    from rl_bridge.buffer.batch import TrainBatch
    from rl_bridge.config import Config
    from rl_bridge.environments.session import SessionDeadlines
    from rl_bridge.generator.actor import PolicyActor
    from rl_bridge.generator.settings import ONE_THREAD, engine_environment
    from rl_bridge.loops.observation import SpanCollector
    from rl_bridge.metrics import Spans, SpanWindow
    from rl_bridge.rollout.actor import RolloutActor
    from rl_bridge.rollout.assignment import Assignment
    from rl_bridge.rollout.episode import EpisodeSettings
    from rl_bridge.rollout.groups import training_samples
    from rl_bridge.rollout.settings import WorkerSettings
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.trainer.actor import TrainerActor
    from rl_bridge.types import Group, Trajectory
    from rl_bridge.weights.store import WeightStore
    from tests.rl_bridge.generator.generator_fixtures import engine_settings
    from tests.rl_bridge.trainer.trainer_ranks import settings

    episode = EpisodeSettings(temperature=1.0, num_turns=8, illegal_reward=-1.0)
    worker = WorkerSettings(
        config=Config.model_validate(CONFIG),
        folder=str(tmp_path),
        model_path=str(tiny_policy),
        sessions=32,
        deadlines=SessionDeadlines(),
        generation_timeout_s=60.0,
        checkpoint_on_preemption=False,
    )
    store = WeightStore.create()
    with LocalProcessProvider(str(CONFIG["env"]["app"])) as environment:
        async with asyncio.timeout(WAIT_S), Fleet(tmp_path / "logs") as fleet:
            policy, trainer, rollout = await asyncio.gather(
                PolicyActor.options(environment=engine_environment(on_gpu=False)).as_service(
                    engine_settings(tiny_policy), store
                ),
                TrainerActor.options(environment=ONE_THREAD).as_service(
                    settings(tiny_policy, folder=tmp_path), store
                ),
                RolloutActor.options(environment=ONE_THREAD).as_service(worker),
            )
            await rollout.take_policy.fanout(policy.roster)
            await rollout.take_servers.fanout([str(environment.url)])

            async def group(number: int) -> Group:
                assignment = Assignment(
                    lease=number, seeds=(number,) * 8, siblings=tuple(range(8)), settings=episode
                )
                outcomes = (await rollout.play.route(assignment)).outcomes
                return Group(
                    id=number,
                    seed=number,
                    trajectories=[one for one in outcomes if isinstance(one, Trajectory)],
                )

            async def iteration(number: int) -> None:
                groups = await asyncio.gather(*(group(8 * number + place) for place in range(8)))
                played = [one for one in groups if len(one.trajectories) > 1]
                batch = TrainBatch.from_samples(training_samples(played, normalize_std=True))
                await trainer.train_step.route(batch)
                await trainer.push_weights.route(number)
                await policy.update_weights.fanout(number)

            collector, window = SpanCollector(fleet, own=Spans()), SpanWindow()
            await iteration(1)  # what is done once, the first time
            await collector.collect()
            window.advance(collector.known)
            for first in range(2, 20, 6):
                for number in range(first, first + 6):
                    await iteration(number)
                await collector.collect()
                spent = window.advance(collector.known)
                if all(
                    totals.unaccounted_s <= UNACCOUNTED * totals.wall_s
                    for name, totals in spent.items()
                    if name != "controller"
                ):
                    break  # what a busy machine takes from a process belongs to nobody
    await store.close()

    del spent["controller"]
    assert spent.keys() == {"policy-0", "trainer-0", "rollout-0"}
    for process, totals in spent.items():
        assert totals.wall_s > 0.1
        assert totals.unaccounted_s / totals.wall_s <= UNACCOUNTED, (process, totals)
    assert {"generate", "load weights"} <= spent["policy-0"].work.keys()
    assert {"train", "push"} <= spent["trainer-0"].work.keys()
    assert {"environment", "policy", "assignments"} <= spent["rollout-0"].idle.keys()
