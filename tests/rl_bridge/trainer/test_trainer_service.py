"""The trainer as a service of ranks on real Monarch: it is killed, and goes on from its checkpoint by itself."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_ranks import alone, assert_close, batch, copied, settings

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.buffer.stored import LeasesInUse, StoredBatch, make_samples
from rl_bridge.errors import NonFiniteLossError, ReplicaLostError, TrainerWentBackError, TrainingError
from rl_bridge.services.handle import ServiceHandle
from rl_bridge.tokens.arrays import TrajectoryTokens
from rl_bridge.trainer.settings import ResumeState
from rl_bridge.types import Completion, Turn

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(1000)]

WAIT_S = 300.0
"""A bound for what would hang otherwise; none is meant to come near it."""
RUN_STATE = {"ledger": [1, 2]}
Tokens = dict[tuple[int, int], TrajectoryTokens]


def played(number: int, *, in_use: frozenset[int] = frozenset()) -> tuple[Tokens, StoredBatch]:
    """Trajectories of one turn, as workers hand them over under a lease, and a step on them."""
    random, tokens = np.random.default_rng(number), Tokens()
    for sibling in range(24):
        length = int(random.integers(4, 9))
        drawn, known = random.integers(3, 30, size=length).tolist(), length - 2
        answer = Completion(tokens=drawn[2:], logprobs=[-3.5] * known, versions=[0] * known, stopped=True)
        tokens[number, sibling] = TrajectoryTokens.of([Turn(prompt=drawn[:2], completion=answer)])
    advantages = random.normal(size=24)
    return tokens, StoredBatch(
        keys=np.array(list(tokens)),
        advantages=advantages,
        trajectories=np.arange(24),
        groups=np.arange(24) // 4,
        rewards=advantages,
        in_use=LeasesInUse(leases=in_use, next_lease=number + 1),
    )


def whole(number: int) -> TrainBatch:
    tokens, step = played(number)
    return TrainBatch.from_samples(make_samples(step, list(tokens.values())))


MEASURED = {"train/tokens_per_s", "train/tokens_per_s_per_rank", "train/flops_per_token"}


@pytest.fixture(autouse=True)
def _ranks_import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()), prepend=os.pathsep)


async def test_a_killed_rank_makes_the_trainer_go_on_from_its_checkpoint(
    policy: Path, tmp_path: Path
) -> None:
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.trainer.actor import TrainerActor
    from rl_bridge.weights import WeightStore

    one = alone(policy, tmp_path / "alone", deterministic=True)
    expected = [one.step(whole(number)) for number in range(5)]
    options = settings(policy, folder=tmp_path / "run", deterministic=True)
    async with asyncio.timeout(3 * WAIT_S), Fleet(tmp_path / "logs"):
        store = WeightStore.create()
        trainer = await TrainerActor.options(procs=2, name="trainer").as_service(options, store)
        assert await trainer.get_resume_state.route() == ResumeState()
        keeper = ServiceHandle(trainer.roster.of_first_ranks())
        metrics = list[dict[str, float]]()
        for number in range(3):
            tokens, step = played(number)
            await keeper.put_tokens.route(tokens)
            metrics.append(await trainer.train_step.route(step, number))
        await keeper.put_tokens.route(played(3)[0])
        await trainer.save_checkpoint.route(3, RUN_STATE, list(played(3)[0]))
        await trainer.train_step.route(played(3)[1], 3)
        with pytest.raises(TrainerWentBackError, match="which the trainer no longer has"):
            await trainer.train_step.route(played(2)[1], 4)  # no rank waits for the others
        for victim in range(2):
            doomed = asyncio.create_task(trainer.train_step.route(batch(4, rows=20_000)))
            await asyncio.sleep(0.3)
            os.kill(trainer.replicas[0].pids[victim], signal.SIGKILL)
            with pytest.raises(ReplicaLostError):
                await doomed
            assert await trainer.get_resume_state.route() == ResumeState(version=3, run_state=RUN_STATE)
        assert [place.restarts for place in trainer.replicas] == [2]
        # The tokens of the next step were in the checkpoint; those of the one after it are played again.
        keeper.update(trainer.roster.of_first_ranks())
        await keeper.put_tokens.route(played(4)[0])
        metrics += [
            await trainer.train_step.route(played(number, in_use=frozenset({4}))[1], number)
            for number in (3, 4)
        ]
        await trainer.push_weights.route(5)
        pushed = await store.get(5)
        await store.close()
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours.keys() - theirs.keys() == MEASURED
        theirs.pop("train/valid_token_share")
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert_close(pushed, one.hf_state_dict(), atol=2e-5)
    assert not list((tmp_path / "run").glob(".meeting*")), "ranks that have met need no file"


async def test_training_errors_are_reported_and_the_trainer_survives(policy: Path, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.trainer.actor import TrainerActor
    from rl_bridge.trainer.checkpoints import newest_checkpoint
    from rl_bridge.weights import WeightStore

    async with asyncio.timeout(WAIT_S), Fleet(tmp_path / "logs"):
        store = WeightStore.create()
        trainer = await TrainerActor.as_service(settings(policy, folder=tmp_path / "run"), store)
        bad = batch(0)
        bad.advantages[0] = float("nan")
        with pytest.raises(NonFiniteLossError, match="learning_rate is the usual cure"):
            await trainer.train_step.route(bad)
        with pytest.raises(TrainingError, match="expected version 0, which the trainer is at, got 1"):
            await trainer.push_weights.route(1)
        # A push goes on beside the next step, and is of the weights before it.
        before = asyncio.create_task(trainer.push_weights.route(0))
        step = asyncio.create_task(trainer.train_step.route(batch(0)))
        await asyncio.gather(before, step)
        await trainer.push_weights.route(1)
        old, new = await store.get(0), await store.get(1)
        assert_close(old, copied(alone(policy, tmp_path / "alone")))
        assert not torch.equal(new["lm_head.weight"], old["lm_head.weight"])
        await trainer.export.route(str(tmp_path), 1)
        assert (tmp_path / "model.safetensors").exists()
        await trainer.save_checkpoint.route(1, RUN_STATE, [], False)
        await trainer.wait_for_checkpoint.route()
        assert newest_checkpoint(tmp_path / "run") == 1
        assert trainer.replicas[0].restarts == 0
        await store.close()


async def test_an_error_of_one_rank_alone_does_not_leave_the_other_waiting(
    policy: Path, tmp_path: Path
) -> None:
    """It ends its process, and the service starts all ranks anew, long before a collective's time is up."""
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.trainer.actor import TrainerActor

    options = settings(policy, folder=tmp_path / "run")
    async with asyncio.timeout(WAIT_S), Fleet(tmp_path / "logs"):
        trainer = await TrainerActor.options(procs=2, name="trainer").as_service(options)
        broken = batch(0)
        broken.target[:1] = 10_000  # no such word; the rank whose part it is meets an IndexError or the like
        with pytest.raises(ReplicaLostError):
            await trainer.train_step.route(broken)
        assert np.isfinite((await trainer.train_step.route(batch(0)))["loss/total"])
        assert trainer.replicas[0].restarts == 1
