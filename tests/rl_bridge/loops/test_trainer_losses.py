"""The loop with roles in this process: where it resumes after a lost trainer or a preemption."""

import asyncio
import errno
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loop_stage import Stage, raising

from rl_bridge.config.monarch import RestartPolicy
from rl_bridge.errors import (
    BridgeError,
    ConfigError,
    NonFiniteLossError,
    NoReplicaError,
    ReplicaLostError,
    WeightsError,
)
from rl_bridge.loops.grpo import train
from rl_bridge.loops.recovery import rewind, train_with_recovery
from rl_bridge.loops.run import Run
from rl_bridge.records import read_lines
from rl_bridge.services.handle import Fanout, LocalService
from rl_bridge.trainer.settings import ResumeState

KILLED = raising(ReplicaLostError("the trainer was killed"))
WAY_BACK = ["sleep", "get_resume_state", "push_weights", "release_gpu", "update_weights"]
KNOWN = {"digest": "0f", "seed": 0, "shuffle": True}


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_lost_trainer_takes_the_run_back_to_its_checkpoint(tmp_path: Path, max_staleness: int) -> None:
    stage = Stage(tmp_path, max_staleness=max_staleness, iterations=7, checkpoint_interval=3)
    stage.on("train_step", KILLED, call=6)
    run = await stage.train()
    assert run.version == stage.roles.trained == stage.roles.served == 7
    assert stage.roles.calls.count("get_resume_state") == 1
    # Iterations 4 and 5 were trained twice, and are there once: those of the history that led to the weights.
    assert [row["iteration"] for row in stage.rows()] == [1, 2, 3, 4, 5, 6, 7]
    history = stage.rows("groups.jsonl")
    assert [row["iteration"] for row in history] == [1, 2, 3, 4, 5, 6, 7]
    assert [group for row in history for group in row["trained"]] == list(range(28))
    # Two groups of two siblings an iteration, of the same history.
    records = [json.loads(line) for line in read_lines(tmp_path)]
    assert [record["iteration"] for record in records] == [n for n in range(1, 8) for _ in range(4)]
    trained = {row["iteration"]: row["trained"] for row in history}
    assert all(record["group"] in trained[record["iteration"]] for record in records)
    assert {record["turns"][0]["trained"][0][0] for record in records} == {True}


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_trainer_lost_while_the_loop_waits_for_rollouts(tmp_path: Path, max_staleness: int) -> None:
    def while_the_sixteenth_group_is_played(number: int) -> bool:
        if number == 16:
            stage.run.buffer.fail(ReplicaLostError("the trainer is gone"))
        return False

    stage = Stage(
        tmp_path,
        max_staleness=max_staleness,
        iterations=6,
        checkpoint_interval=2,
        lost=while_the_sixteenth_group_is_played,
        sessions=2,
    )
    run = await stage.train()
    assert run.version == stage.roles.trained == 6
    assert stage.roles.calls.count("get_resume_state") == 1
    assert [group for row in stage.rows("groups.jsonl") for group in row["trained"]] == list(range(24))


async def test_trainer_that_was_restarted_unseen_is_not_trained_on(tmp_path: Path) -> None:
    def restarts() -> None:  # its process died when nobody called, and is back at the first checkpoint
        stage.roles.trained = 2

    stage = Stage(tmp_path, max_staleness=1, iterations=5, checkpoint_interval=2)
    stage.on("save_checkpoint", restarts, call=2)
    await stage.train()
    assert stage.roles.trained == 5
    assert stage.roles.calls.count("get_resume_state") == 1
    assert [row["iteration"] for row in stage.rows()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("when", "colocate"),
    [(when, False) for when in ("get_resume_state", "push_weights", "export", "save_checkpoint")]
    + [(when, True) for when in ("get_resume_state", "push_weights", "release_gpu", "sleep", "export")],
)
async def test_trainer_lost_in_any_phase_takes_the_run_back(
    tmp_path: Path, when: str, colocate: bool
) -> None:
    stage = Stage(tmp_path, max_staleness=1, iterations=5, checkpoint_interval=2, colocate=colocate)
    stage.on("train_step", KILLED, call=3)  # so that there is a way back to be lost on
    stage.on(when, KILLED, call=1 if when in ("get_resume_state", "export") else 3)
    run = await stage.train()
    assert run.version == stage.roles.trained == stage.roles.served == 5
    assert [group for row in stage.rows("groups.jsonl") for group in row["trained"]] == list(range(20))


async def test_colocated_trainer_lost_in_the_generators_turn_has_them_sleep_first(tmp_path: Path) -> None:
    stage = Stage(tmp_path, iterations=3, checkpoint_interval=1, colocate=True)
    # With the weights of the second step they have the turn.
    stage.on("update_weights", lambda: stage.run.mark_trainer_lost(), call=3)
    await stage.train()
    # An actor that is started again answers this in its own turn.
    at = stage.roles.calls.index("get_resume_state")
    assert stage.roles.calls[at - 2 : at + 4] == ["update_weights", *WAY_BACK]
    assert stage.roles.trained == 3
    assert stage.roles.awake


class NobodyServes(LocalService):
    """Generators that are being started again, which may need the trainer for it."""

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
        if wait:
            raise NoReplicaError(f"nobody came for {name}")
        return await super()._fan_out(name, args, kwargs)


async def test_colocated_run_goes_back_while_no_generator_serves(tmp_path: Path) -> None:
    stage = Stage(tmp_path, iterations=3, checkpoint_interval=1, colocate=True)

    async def goes_back(run: Run) -> None:
        run.policy = NobodyServes(stage.roles)
        assert await rewind(run) == 0

    await stage.train(goes_back)
    assert stage.roles.calls == WAY_BACK


async def test_weights_of_a_trainer_that_began_anew_are_not_exported_for_the_trained_ones(
    tmp_path: Path,
) -> None:
    def began_anew() -> None:  # nobody waited for it when it was lost, and there is no checkpoint
        stage.roles.trained = 0

    stage = Stage(tmp_path, iterations=3, checkpoint_interval=0)
    stage.on("export", began_anew, call=1)
    run = await stage.train()
    assert stage.roles.calls.count("get_resume_state") == 1
    assert run.version == stage.roles.trained == stage.roles.served == 3


async def test_trainer_that_is_back_before_the_generators_have_left_takes_the_run_back(
    tmp_path: Path,
) -> None:
    def back_at_once() -> None:
        stage.roles.trained = stage.roles.saved.version
        stage.run.mark_trainer_lost()

    stage = Stage(tmp_path, iterations=4, checkpoint_interval=1, colocate=True)
    stage.on("sleep", back_at_once, call=3)  # for the second step; that for a checkpoint comes before it
    run = await stage.train()
    assert run.version == stage.roles.trained == stage.roles.served == 4
    assert stage.roles.calls.count("get_resume_state") == 1
    # It is at the very version that the loop has come to. A step from there would take it where it cannot be had back
    # from: what it says it resumed at is what it began with.
    phases = [name for name in stage.roles.calls if name in ("train_step", "get_resume_state")]
    assert phases[:3] == ["train_step", "get_resume_state", "train_step"]


async def test_damage_of_newer_checkpoints_is_reported(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.roles.saved = ResumeState(damaged=("step-4 [is] torn",))
    run = await stage.train(rewind)
    assert run.console.file.getvalue() == "step-4 [is] torn\n"  # type: ignore[attr-defined]  # a StringIO


async def test_loss_that_is_not_finite_ends_the_run_and_a_resumed_one_trains_what_was_finished(
    tmp_path: Path,
) -> None:
    async def diverges_in_the_fourth_step() -> None:
        steps = stage.roles.calls.count("train_step")
        while steps == 2 and len(stage.run.buffer.state()[1]) < 4:  # noqa: ASYNC110 - the next batch, of which none is told
            await asyncio.sleep(0)
        if steps == 4:
            raise NonFiniteLossError("the loss is nan")

    stage = Stage(tmp_path, max_staleness=2, iterations=6, checkpoint_interval=2)
    stage.on("train_step", diverges_in_the_fourth_step)
    with pytest.raises(NonFiniteLossError):
        await stage.train()
    saved = stage.roles.saved
    assert (saved.version, "get_resume_state" in stage.roles.calls) == (2, False)
    finished = saved.run_state["ledger"]["finished"]

    async def resume(run: Run) -> None:
        assert await rewind(run) == 2
        await train_with_recovery(run)

    assert (await stage.train(resume)).version == 6
    trained = {row["iteration"]: row["trained"] for row in stage.rows("groups.jsonl")}
    assert trained[3] == finished[:4]


async def test_checkpoint_that_was_lost_with_its_trainer_is_not_waited_for(tmp_path: Path) -> None:
    async def fail(run: Run) -> None:
        with pytest.raises(ReplicaLostError):
            await train(run)
        assert run.checkpoint_begun == 4
        assert await rewind(run) == run.checkpoint_begun == 2
        await run.wait_for_checkpoint()
        run.mark_trainer_lost()
        assert run.checkpoint_begun == 0
        await run.wait_for_checkpoint()

    stage = Stage(tmp_path, iterations=5, checkpoint_interval=2)
    stage.on("save_checkpoint", KILLED, call=2)
    stage.on("wait_for_checkpoint", KILLED)
    await stage.train(fail)
    assert stage.roles.calls.count("wait_for_checkpoint") == 1


@pytest.mark.parametrize(("when", "reached"), [("push_weights", 0), ("train_step", 3)])
async def test_trainer_that_is_lost_at_the_same_place_every_time_ends_the_run(
    tmp_path: Path, when: str, reached: int
) -> None:
    def is_killed() -> None:
        if stage.roles.trained >= reached:  # which the run comes to every time
            KILLED()

    stage = Stage(tmp_path, iterations=6, checkpoint_interval=1000)
    stage.on(when, is_killed)
    with pytest.raises(ReplicaLostError, match="killed"):
        await stage.train()
    assert stage.roles.calls.count("get_resume_state") == stage.config.monarch.restarts.budget + 1


async def test_losses_with_an_iteration_between_them_do_not_end_the_run(tmp_path: Path) -> None:
    def is_killed() -> None:
        if stage.roles.calls.count("train_step") % 2:  # once in each iteration
            KILLED()

    stage = Stage(tmp_path, iterations=RestartPolicy().budget + 3, checkpoint_interval=1)
    stage.on("train_step", is_killed)
    run = await stage.train()
    assert (
        run.version == stage.roles.calls.count("get_resume_state") > stage.config.monarch.restarts.budget + 1
    )


async def test_weights_that_went_with_the_trainer_take_the_run_back(tmp_path: Path) -> None:
    def gone() -> None:
        # The generator learns of it first, and the fleet a moment later.
        asyncio.get_running_loop().call_later(0.05, stage.run.mark_trainer_lost)
        raise WeightsError("whoever published version 3 is gone")

    stage = Stage(tmp_path, max_staleness=1, iterations=5, checkpoint_interval=2)
    stage.on("update_weights", gone, call=3)
    run = await stage.train()
    assert run.version == stage.roles.trained == stage.roles.served == 5
    assert stage.roles.calls.count("get_resume_state") == 1


async def test_weights_that_cannot_be_had_of_a_living_trainer_end_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.on("update_weights", raising(WeightsError("it is torn")))
    with pytest.raises(WeightsError, match="torn"):
        await stage.train()
    assert "get_resume_state" not in stage.roles.calls


@pytest.mark.parametrize("loss_first", [True, False])
async def test_preempted_run_that_loses_its_trainer_ends_all_the_same(
    tmp_path: Path, loss_first: bool
) -> None:
    def preempted_and_lost() -> None:
        events = [stage.run.mark_trainer_lost, stage.run.preempt]
        for one in events if loss_first else reversed(events):
            one()

    stage = Stage(tmp_path, iterations=9, checkpoint_interval=2)
    stage.on("train_step", preempted_and_lost, call=4)
    run = await stage.train()
    assert stage.done is False
    assert run.version < 9


async def test_trained_policy_that_finds_no_room_ends_the_run_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(shutil, "copy2", lambda *_: full())
    stage = Stage(tmp_path)
    with pytest.raises(BridgeError, match=r"cannot write the trained policy .*No space left.*--resume"):
        await stage.train()
    assert stage.roles.saved.version == 2


async def test_checkpoint_of_another_dataset_is_refused_before_anything_goes_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, dataset=KNOWN)
    await stage.train()
    stage.dataset = {**KNOWN, "digest": "f0"}
    stage.roles.calls.clear()
    with pytest.raises(ConfigError, match=r"with digest='0f', got 'f0'.*data\.source"):
        await stage.train(rewind)
    assert stage.roles.calls == ["get_resume_state"]
    stage.dataset = dict(KNOWN)
    assert (await stage.train(rewind)).version == 2
