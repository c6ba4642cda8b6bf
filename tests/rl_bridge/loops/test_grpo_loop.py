"""The loop among roles that are no processes: order, deadlines, what ends it, and what it goes back to."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rl_bridge.buffer.admission import Admission
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.errors import BridgeError, ReplicaLost, RoleFailed, RolloutError, TrainerWentBack, WeightsError
from rl_bridge.loops.evaluation import evaluate
from rl_bridge.loops.grpo import train
from rl_bridge.loops.history import GroupHistory
from rl_bridge.loops.observer import RunObserver
from rl_bridge.loops.recovery import train_to_the_end
from rl_bridge.loops.rewind import rewind
from rl_bridge.loops.run import Preempted, Run
from rl_bridge.loops.settings import dispatch_settings
from rl_bridge.loops.weight_sync import SyncFigures, WeightSync
from rl_bridge.metrics import JsonlSink, MetricsLog
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory, Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.services.local import LocalService
from rl_bridge.trainer.settings import ResumeState
from rl_bridge.types import Completion, Ending, Trajectory, Turn


async def hang() -> None:
    await asyncio.sleep(60)


class Parts:
    """The roles, in this process. `calls` is what they were asked for; `failing` is what one of them does instead."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, Callable[[], Any]] = {}
        self.trained = 0
        self.served = 0
        self.saved = ResumeState()

    async def called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            await self.failing[name]()


class Trainer(Parts):
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def train_step(self, batch: Any, version: int) -> dict[str, float]:
        await self._parts.called("train_step")
        if version != self._parts.trained:
            raise TrainerWentBack(f"expected {self._parts.trained}, got {version}")
        self._parts.trained += 1
        return {"loss/total": 0.0}

    async def push_weights(self, version: int) -> float:
        await self._parts.called("push_weights")
        assert version == self._parts.trained
        return 0.25

    async def save_checkpoint(
        self, version: int, run_state: dict[str, Any], attachments: dict[str, bytes]
    ) -> None:
        await self._parts.called("save_checkpoint")
        state = json.loads(json.dumps(run_state))
        self._parts.saved = ResumeState(version=version, run_state=state, attachments=attachments)

    async def resumed(self) -> ResumeState:
        await self._parts.called("resumed")
        self._parts.trained = self._parts.saved.version
        return self._parts.saved

    async def export(self, folder: str) -> None:
        await self._parts.called("export")


class Policy:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def update_weights(self, version: int) -> SimpleNamespace:
        await self._parts.called("update_weights")
        self._parts.served = version
        return SimpleNamespace(transport_s=0.5, pause_s=0.75, load_s=0.125)


class Reference:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def logprobs(self, batch: Any) -> Any:
        await self._parts.called("logprobs")
        return np.zeros(len(batch), dtype=np.float32)


class Rollout:
    """Plays one turn an episode; the siblings' rewards alternate. Every episode of a lost group is dropped."""

    def __init__(self, parts: Parts, lost: Callable[[int], bool]) -> None:
        self._parts = parts
        self._lost = lost
        self.played = 0

    async def play(self, assignment: Assignment) -> AssignmentResult:
        self.played += 1
        if self._lost(self.played):
            gone: Outcome = NoTrajectory(absence=Absence.DROPPED, reason="the table is on fire")
            outcomes = (gone,) * len(assignment.seeds)
            return AssignmentResult(
                lease=assignment.lease, outcomes=outcomes, last_failure="the table is on fire"
            )
        return AssignmentResult(
            lease=assignment.lease,
            outcomes=tuple(
                self._one(seed, sibling)
                for seed, sibling in zip(assignment.seeds, assignment.siblings, strict=True)
            ),
        )

    def _one(self, seed: int, sibling: int) -> Trajectory:
        answer = Completion(
            tokens=[sibling % 2], logprobs=[-0.5], versions=[self._parts.served], stopped=True
        )
        turn = Turn(prompt=[1, 2], completion=answer)
        return Trajectory(seed=seed, turns=[turn], ending=Ending.COMPLETED, reward=float(sibling % 2))

    async def cut(self, leases: tuple[int, ...]) -> None:
        pass


class Task:
    def figures(self, trajectories: Any) -> dict[str, float]:
        return {"task/trajectories": float(len(trajectories))}

    async def probe(self, policy: Any) -> dict[str, float]:
        return {"score": 1.0}


class Stage:
    def __init__(
        self,
        folder: Path,
        *,
        lost: Callable[[int], bool] = lambda number: False,
        max_staleness: int = 0,
        sessions: int = 8,
        **trainer: Any,
    ) -> None:
        self.folder = folder
        self.parts = Parts()
        self.lost = lost
        self.config = Config.model_validate(
            {
                "env": {"app": "a:b", "sessions": sessions},
                "rollout": {
                    "task": "c:D",
                    "batch_size": 8,
                    "group_size": 2,
                    "max_staleness": max_staleness,
                    "timeout_s": 5.0,
                },
                "monarch": {"heartbeat_interval": 0.05},
                "trainer": {"iterations": 2, "timeout_s": 0.5, "checkpoint_interval": 1, **trainer},
            }
        )

    async def train(
        self,
        *,
        reference: bool = False,
        losses: int = 0,
        work: Callable[[Run], Awaitable[object]] | None = None,
    ) -> Run:
        """Train to the end; goes back as often as `losses` says. Or `work` says what is done."""
        parts, config = self.parts, self.config
        rollout = config.rollout
        buffer = ReplayBuffer(
            Ledger(max_losses=2),
            Admission(
                groups_per_batch=4,
                max_staleness=rollout.max_staleness,
                iterations=config.trainer.iterations,
            ),
            timeout_s=rollout.timeout_s,
            straggler_timeout_s=rollout.straggler_timeout_s,
        )
        service: Any = LocalService(Rollout(parts, self.lost))
        with MetricsLog([JsonlSink(self.folder / "metrics.jsonl")]) as metrics:
            async with Dispatcher(service, buffer, dispatch_settings(config)) as dispatcher:
                sync = WeightSync(
                    failed=buffer.fail,
                    overlapped=rollout.max_staleness > 0,
                    timeout_s=config.trainer.timeout_s,
                )
                run = Run(
                    config=config,
                    folder=self.folder,
                    model_path=self.folder,
                    task=Task(),  # type: ignore[arg-type]
                    chat=None,  # type: ignore[arg-type]
                    policy=LocalService(Policy(parts)),
                    trainer=LocalService(Trainer(parts)),
                    reference=LocalService(Reference(parts)) if reference else None,
                    buffer=buffer,
                    dispatcher=dispatcher,
                    sync=sync,
                    observer=RunObserver(SimpleNamespace(services={})),  # type: ignore[arg-type]
                    metrics=metrics,
                    history=GroupHistory(self.folder, buffer.ledger),
                    console=Console(file=io.StringIO()),
                )
                self.run = run
                try:
                    if work is not None:
                        await work(run)
                        return run
                    while True:
                        try:
                            await train(run)
                            await sync.finish()
                            return run
                        except (ReplicaLost, TrainerWentBack):
                            if not losses:
                                raise
                            losses -= 1
                            await rewind(run)
                finally:
                    await sync.cancel()

    def rows(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / file).read_text().splitlines()]


async def test_every_iteration_collects_trains_synchronises_logs_and_saves(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    logged_at_save: list[int] = []

    async def look() -> None:
        logged_at_save.append(len(stage.rows()))

    stage.parts.failing["save_checkpoint"] = look
    await stage.train(reference=True)
    assert (
        stage.parts.calls
        == ["logprobs", "train_step", "push_weights", "update_weights", "save_checkpoint"] * 2
    )
    # A checkpoint never knows of an iteration that was not logged: resumed, the log would have a gap.
    assert logged_at_save == [1, 2]
    assert [row["iteration"] for row in stage.rows()] == [1, 2]
    assert [row["rollout/staleness/0"] for row in stage.rows()] == [1.0, 1.0]
    assert 0.0 < stage.rows()[0]["time/elapsed_s"] < stage.rows()[1]["time/elapsed_s"]
    assert "probe/score" in stage.rows()[1]
    sync = {name: value for name, value in stage.rows()[0].items() if name.startswith("sync/")}
    assert sync == {"sync/push_s": 0.25, "sync/transport_s": 0.5, "sync/pause_s": 0.75, "sync/load_s": 0.125}
    assert stage.rows("groups.jsonl") == [
        {"iteration": 1, "trained": [0, 1, 2, 3], "dropped": {}},
        {"iteration": 2, "trained": [4, 5, 6, 7], "dropped": {}},
    ]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("logprobs", "a step of the optimizer"),
        ("train_step", "a step of the optimizer"),
        ("push_weights", "new weights to be served"),
        ("update_weights", "new weights to be served"),
        ("save_checkpoint", "a checkpoint"),
    ],
)
@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_role_that_hangs_ends_the_run_by_its_deadline(
    tmp_path: Path, name: str, told: str, max_staleness: int
) -> None:
    stage = Stage(tmp_path, max_staleness=max_staleness, iterations=4)
    stage.parts.failing[name] = hang
    with pytest.raises(RoleFailed, match=rf"expected {told} within 0\.5 s.*trainer\.timeout_s"):
        await asyncio.wait_for(stage.train(reference=True), 20)


@pytest.mark.parametrize("name", ["train_step", "push_weights", "update_weights"])
async def test_timeout_of_somebody_else_is_not_taken_for_the_deadline(tmp_path: Path, name: str) -> None:
    async def other() -> None:
        raise TimeoutError("another clock")

    stage = Stage(tmp_path)
    stage.parts.failing[name] = other
    with pytest.raises(TimeoutError, match="another clock"):
        await stage.train()


async def test_environment_that_always_fails_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lost=lambda number: True)
    with pytest.raises(RolloutError, match=r"none of the last 4 groups could be trained.*on fire"):
        await stage.train()
    assert stage.parts.calls == []


async def test_lost_groups_are_replaced_by_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lost=lambda number: number in (1, 3))
    await stage.train()
    assert [row["rollout/trajectories"] for row in stage.rows()] == [8, 8]
    first, second = stage.rows("groups.jsonl")
    assert set(first["dropped"]) == {"0", "2"}
    assert set(first["dropped"].values()) == {"too few siblings: 2 dropped"}
    assert first["trained"] + second["trained"] == [1, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_lost_trainer_takes_the_run_back_to_its_checkpoint(tmp_path: Path, max_staleness: int) -> None:
    stage = Stage(tmp_path, max_staleness=max_staleness, iterations=7, checkpoint_interval=3)
    calls = 0

    async def dies_in_the_sixth_step() -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise ReplicaLost("the trainer was killed")

    stage.parts.failing["train_step"] = dies_in_the_sixth_step
    run = await stage.train(losses=1)
    assert run.version == stage.parts.trained == stage.parts.served == 7
    # Iterations 4 and 5 were trained twice, and are there once: those of the history that led to the weights.
    assert [row["iteration"] for row in stage.rows()] == [1, 2, 3, 4, 5, 6, 7]
    history = stage.rows("groups.jsonl")
    assert [row["iteration"] for row in history] == [1, 2, 3, 4, 5, 6, 7]
    assert [group for row in history for group in row["trained"]] == list(range(28))


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("slots", [4, 1])
async def test_trainer_lost_while_the_loop_waits_for_rollouts(
    tmp_path: Path, max_staleness: int, slots: int
) -> None:
    def while_the_sixteenth_group_is_played(number: int) -> bool:
        if number == 16:
            stage.run.buffer.fail(ReplicaLost("the trainer is gone"))
        return False

    stage = Stage(
        tmp_path,
        max_staleness=max_staleness,
        iterations=6,
        checkpoint_interval=2,
        lost=while_the_sixteenth_group_is_played,
        sessions=2 * slots,
    )
    run = await asyncio.wait_for(stage.train(losses=1), 20)
    assert run.version == stage.parts.trained == 6
    assert [group for row in stage.rows("groups.jsonl") for group in row["trained"]] == list(range(24))


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_trainer_that_was_restarted_unseen_is_not_trained_on(
    tmp_path: Path, max_staleness: int
) -> None:
    stage = Stage(tmp_path, max_staleness=max_staleness, iterations=5, checkpoint_interval=2)
    saves = 0

    async def restarts_after_the_second_checkpoint() -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            stage.parts.trained = (
                2  # its process died when nobody called, and is back at the first checkpoint
            )

    stage.parts.failing["save_checkpoint"] = restarts_after_the_second_checkpoint
    await stage.train(losses=1)
    assert stage.parts.trained == 5
    assert [row["iteration"] for row in stage.rows()] == [1, 2, 3, 4, 5]


async def test_weights_that_cannot_be_brought_end_the_run_while_it_waits_for_rollouts(tmp_path: Path) -> None:
    async def full() -> None:
        raise RoleFailed("no memory")

    stage = Stage(tmp_path, max_staleness=1, iterations=20)
    stage.parts.failing["update_weights"] = full
    with pytest.raises(RoleFailed, match="no memory"):
        await asyncio.wait_for(stage.train(), 20)
    assert stage.run.version < 4


async def test_preempted_run_ends_between_two_iterations(tmp_path: Path) -> None:
    stage = Stage(tmp_path, iterations=9)

    async def told_to_go() -> None:
        if stage.run.version == 3:
            stage.run.preempt()

    stage.parts.failing["train_step"] = told_to_go
    with pytest.raises(Preempted):
        await stage.train()
    assert stage.run.version == stage.parts.trained == 4
    await stage.run.checkpoint(now=True)
    assert stage.parts.saved.version == 4


def nth(number: int, then: Callable[[], Any]) -> Callable[[], Any]:
    """Does something when it is called for the n-th time."""
    calls = 0

    async def called() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            then()

    return called


def is_killed() -> None:
    raise ReplicaLost("the trainer was killed")


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("when", ["resumed", "push_weights", "export", "save_checkpoint"])
async def test_trainer_lost_in_any_phase_takes_the_run_back(
    tmp_path: Path, when: str, max_staleness: int
) -> None:
    stage = Stage(tmp_path, max_staleness=max_staleness, iterations=5, checkpoint_interval=2)
    stage.parts.failing["train_step"] = nth(3, is_killed)  # so that there is a way back to be lost on
    stage.parts.failing[when] = nth(1 if when in ("resumed", "export") else 3, is_killed)
    run = await asyncio.wait_for(stage.train(work=train_to_the_end), 20)
    assert run.version == stage.parts.trained == stage.parts.served == 5
    assert [group for row in stage.rows("groups.jsonl") for group in row["trained"]] == list(range(20))


async def test_trainer_that_is_lost_for_ever_ends_the_run(tmp_path: Path) -> None:
    async def killed() -> None:
        is_killed()

    stage = Stage(tmp_path)
    stage.parts.failing["push_weights"] = killed
    with pytest.raises(ReplicaLost, match="killed"):
        await asyncio.wait_for(stage.train(work=train_to_the_end), 20)
    assert stage.parts.calls.count("resumed") == stage.config.monarch.restarts.budget + 1


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_weights_that_went_with_the_trainer_take_the_run_back(
    tmp_path: Path, max_staleness: int
) -> None:
    def gone() -> None:
        # The generator learns of it first, and the fleet a moment later.
        asyncio.get_running_loop().call_later(0.05, stage.run.lost_the_trainer)
        raise WeightsError("whoever published version 3 is gone")

    stage = Stage(tmp_path, max_staleness=max_staleness, iterations=5, checkpoint_interval=2)
    stage.parts.failing["update_weights"] = nth(3, gone)
    run = await asyncio.wait_for(stage.train(work=train_to_the_end), 20)
    assert run.version == stage.parts.trained == stage.parts.served == 5
    assert stage.parts.calls.count("resumed") == 1


async def test_weights_that_cannot_be_had_of_a_living_trainer_end_the_run(tmp_path: Path) -> None:
    def torn() -> None:
        raise WeightsError("it is torn")

    stage = Stage(tmp_path)
    stage.parts.failing["update_weights"] = nth(1, torn)
    with pytest.raises(WeightsError, match="torn"):
        await asyncio.wait_for(stage.train(work=train_to_the_end), 20)
    assert "resumed" not in stage.parts.calls


@pytest.mark.parametrize("loss_first", [True, False])
async def test_preempted_run_that_loses_its_trainer_ends_all_the_same(
    tmp_path: Path, loss_first: bool
) -> None:
    def told_and_lost() -> None:
        told = [stage.run.lost_the_trainer, stage.run.preempt]
        for one in told if loss_first else reversed(told):
            one()

    stage = Stage(tmp_path, iterations=9, checkpoint_interval=2)
    stage.parts.failing["train_step"] = nth(4, told_and_lost)
    ended: list[bool] = []

    async def work(run: Run) -> None:
        ended.append(await train_to_the_end(run))

    run = await asyncio.wait_for(stage.train(work=work), 20)
    assert ended == [False]
    assert run.version < 9


async def test_preempted_run_whose_checkpoint_cannot_be_written_keeps_the_older_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path, iterations=9, checkpoint_interval=2)
    stage.parts.failing["train_step"] = nth(3, lambda: stage.run.preempt())
    stage.parts.failing["save_checkpoint"] = nth(2, is_killed)
    ended: list[bool] = []

    async def work(run: Run) -> None:
        ended.append(await train_to_the_end(run))

    await asyncio.wait_for(stage.train(work=work), 20)
    assert ended == [False]
    assert stage.parts.saved.version == 2


async def test_groups_given_up_before_a_checkpoint_out_of_turn_are_told_by_the_resumed_run(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, iterations=3, lost=lambda number: number == 6)

    async def preempted(run: Run) -> None:
        # The second iteration's groups are played when the news comes, one of them is given up.
        task = asyncio.create_task(train(run))
        while not run.buffer.ledger.dropped:  # noqa: ASYNC110 - the ledger tells nobody else
            await asyncio.sleep(0)
        run.preempt()
        with pytest.raises(Preempted):
            await task
        await run.checkpoint(now=True)
        run.preempted = False
        run.buffer._failure = None
        await rewind(run)
        await train(run)

    await asyncio.wait_for(stage.train(work=preempted), 20)
    rows = stage.rows("groups.jsonl")
    assert {group for row in rows for group in row["dropped"]} == {"5"}
    assert sorted([group for row in rows for group in row["trained"]] + [5]) == list(range(13))


def test_slowest_generator_is_what_new_weights_cost() -> None:
    def taken(*seconds: float) -> Any:
        return SimpleNamespace(**dict(zip(("transport_s", "pause_s", "load_s"), seconds, strict=True)))

    figures = SyncFigures.of(9.0, [taken(1.0, 5.0, 2.0), taken(3.0, 4.0, 1.0)])
    assert figures == SyncFigures(push_s=9.0, transport_s=3.0, pause_s=5.0, load_s=2.0)


@pytest.mark.parametrize("file", ["metrics.jsonl", "groups.jsonl"])
async def test_disk_without_room_for_the_figures_ends_the_run_and_says_so(tmp_path: Path, file: str) -> None:
    (tmp_path / file).symlink_to("/dev/full")
    with pytest.raises(BridgeError, match=r"No space left on device; .*--resume"):
        await Stage(tmp_path).train()


async def test_held_out_episodes_have_the_time_of_as_many_steps(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    given: list[float] = []

    async def look(run: Run) -> None:
        async def play_held_out(seeds: Any, *arguments: Any, timeout_s: float, **others: Any) -> list[Any]:
            given.append(timeout_s / len(seeds))
            return []

        run.dispatcher.play_held_out = play_held_out  # type: ignore[method-assign]
        await evaluate(run)

    await stage.train(work=look)
    assert given == [pytest.approx(5.0 / 8, rel=0.01)] * 3
