"""The synchronous loop among roles that are no processes: order, deadlines, and what ends it."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rl_bridge.buffer.bounded import ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.errors import RoleFailed, RolloutError
from rl_bridge.loops.run import Run
from rl_bridge.loops.synchronous import train
from rl_bridge.metrics import JsonlSink, MetricsLog
from rl_bridge.types import Completion, Ending, Trajectory, Turn


class Endpoint:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.call_one = call


class Role:
    """Notes what it is asked for; hangs where told to."""

    def __init__(self, calls: list[str], **answers: Callable[..., Any]) -> None:
        for name, answer in answers.items():
            setattr(self, name, Endpoint(self._endpoint(calls, name, answer)))

    def _endpoint(
        self, calls: list[str], name: str, answer: Callable[..., Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            calls.append(name)
            if answer is hang:
                await asyncio.sleep(60)
            return answer(*args)

        return call


def hang(*args: Any) -> None:
    raise AssertionError("never called")


class Task:
    def figures(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {"task/trajectories": float(len(trajectories))}

    async def probe(self, policy: Any) -> dict[str, float]:
        return {"score": 1.0}


class Workers:
    """Plays one turn an episode; the seeds' rewards alternate. Loses the episodes at the given places."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.lost = lost
        self.retried = self.dropped = self.unscored = 0
        self.last_failure = ValueError("the table is on fire")
        self.last_unscored = None
        self.version = 0

    async def play(self, seeds: Sequence[int], settings: Any, *, timeout_s: float) -> list[Trajectory | None]:
        def one(place: int, seed: int) -> Trajectory:
            answer = Completion(tokens=[place % 2], logprobs=[-0.5], versions=[self.version], stopped=True)
            turn = Turn(prompt=[1, 2], completion=answer)
            return Trajectory(seed=seed, turns=[turn], ending=Ending.COMPLETED, reward=float(place % 2))

        return [None if i in self.lost else one(i, seed) for i, seed in enumerate(seeds)]


class Stage:
    def __init__(self, folder: Path, *, lost: Sequence[int] = (), **settings: Any) -> None:
        self.calls: list[str] = []
        self.path = folder / "metrics.jsonl"
        self.workers = Workers(lost)
        self.version = 0
        self.answers: dict[str, Callable[..., Any]] = {
            "step": self._step,
            "publish": lambda: self.version,
            "save": lambda last: None,
            "load": self._load,
            "logprobs": lambda batch: np.zeros(len(batch), dtype=np.float32),
        }
        self.config = Config.model_validate(
            {
                "env": {"app": "a:b"},
                "rollout": {"task": "c:D", "batch_size": 8, "group_size": 2},
                "trainer": {"iterations": 2, "timeout_s": 0.2, **settings},
            }
        )
        self.folder = folder

    def _step(self, batch: Any) -> dict[str, float]:
        self.version += 1
        return {"loss/total": 0.0}

    def _load(self, snapshot: int) -> int:
        self.workers.version = snapshot
        return snapshot

    async def train(self, *, reference: bool = False, seconds_before: float = 0.0) -> None:
        def role(*names: str) -> Role:
            return Role(self.calls, **{name: self.answers[name] for name in names})

        with MetricsLog([JsonlSink(self.path)]) as metrics:
            await train(
                Run(
                    config=self.config,
                    folder=self.folder,
                    model_path=self.folder,
                    task=Task(),  # type: ignore[arg-type]
                    policy=None,  # type: ignore[arg-type]
                    workers=self.workers,  # type: ignore[arg-type]
                    buffer=ReplayBuffer(capacity=4, max_staleness=0),
                    trainer=role("step", "publish", "save"),
                    generator=role("load"),
                    reference=role("logprobs") if reference else None,
                    metrics=metrics,
                    console=Console(file=io.StringIO()),
                    seconds_before=seconds_before,
                )
            )

    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


async def test_every_iteration_collects_trains_synchronises_logs_and_saves(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    logged_at_save: list[int] = []
    stage.answers["save"] = lambda last: logged_at_save.append(len(stage.rows()))
    await stage.train(reference=True, seconds_before=100.0)
    assert stage.calls == ["logprobs", "step", "publish", "load", "save"] * 2
    # A checkpoint never knows of an iteration that was not logged: resumed, the log would have a gap.
    assert logged_at_save == [1, 2]
    assert [row["iteration"] for row in stage.rows()] == [1, 2]
    assert [row["rollout/staleness/0"] for row in stage.rows()] == [1.0, 1.0]
    assert 100.0 < stage.rows()[0]["time/elapsed_s"] < stage.rows()[1]["time/elapsed_s"] < 160.0
    assert "probe/score" in stage.rows()[1]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("logprobs", "a step of the optimizer"),
        ("step", "a step of the optimizer"),
        ("publish", "the generator's new weights"),
        ("load", "the generator's new weights"),
        ("save", "a checkpoint"),
    ],
)
async def test_role_that_hangs_ends_the_run_by_its_deadline(tmp_path: Path, name: str, told: str) -> None:
    stage = Stage(tmp_path)
    stage.answers[name] = hang
    with pytest.raises(RoleFailed, match=rf"expected {told} within 0\.2 s.*trainer\.timeout_s"):
        await asyncio.wait_for(stage.train(reference=True), 20)


async def test_timeout_of_somebody_else_is_not_taken_for_the_deadline(tmp_path: Path) -> None:
    def other(batch: Any) -> None:
        raise TimeoutError("another clock")

    stage = Stage(tmp_path)
    stage.answers["step"] = other
    with pytest.raises(TimeoutError, match="another clock"):
        await stage.train()


@pytest.mark.parametrize("lost", [range(1, 8, 2), range(5), range(8)], ids=["halves", "most", "all"])
async def test_too_few_groups_end_the_run_with_the_reason(tmp_path: Path, lost: Sequence[int]) -> None:
    stage = Stage(tmp_path, lost=list(lost))
    with pytest.raises(RolloutError, match=r"expected 4 groups in iteration 1, got [01]; .*on fire"):
        await stage.train()
    assert stage.calls == []


async def test_some_lost_episodes_do_not(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lost=[0, 3])
    await stage.train()
    assert [row["rollout/trajectories"] for row in stage.rows()] == [4, 4]
