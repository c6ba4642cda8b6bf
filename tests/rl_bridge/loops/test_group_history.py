"""What became of each group, and what a checkpoint holds of it: all of one moment."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.buffer.stored import dump_groups, load_groups
from rl_bridge.config import Config
from rl_bridge.loops.grpo import collect
from rl_bridge.loops.run import HISTORY_FILE, GroupHistory, Run
from rl_bridge.rollout import dispatcher as dispatching
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def drop(ledger: Ledger, count: int) -> None:
    for _ in range(count):
        lease = ledger.lease(served=0, now=0.0, admit=True)
        assert lease is not None
        ledger.drop(lease.id, "no reward")


def rows(folder: Path) -> list[dict[str, dict[str, str]]]:
    return [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]


def test_fates_that_a_checkpoint_holds_are_told_once_by_whoever_goes_on_from_it(tmp_path: Path) -> None:
    ledger = Ledger(max_losses=None)
    history = GroupHistory(tmp_path, ledger)
    drop(ledger, 1)
    history.write(1)
    drop(ledger, 1)  # after the iteration's line, before the checkpoint
    state = json.loads(json.dumps(ledger.state())), json.loads(json.dumps(history.state()))
    drop(ledger, 1)  # after the checkpoint: it is played again
    history.write(2)

    resumed = Ledger(max_losses=None)
    history = GroupHistory(tmp_path, resumed)
    resumed.restore(state[0])
    history.rewind(1, state[1])
    drop(resumed, 1)
    history.write(2)
    assert [list(row["dropped"]) for row in rows(tmp_path)] == [["0"], ["1", "2"]]


PATIENCE_S = 60.0


def buffer_of_two() -> ReplayBuffer:
    admission = Admission(groups_per_batch=2, max_staleness=1, iterations=9)
    return ReplayBuffer(Ledger(max_losses=None), admission, timeout_s=9.0, straggler_timeout_s=9.0)


def group(number: int) -> Group:
    completion = Completion(tokens=[number], logprobs=[-0.5], versions=[0], stopped=True)
    turns = [Turn(prompt=[1, 2], completion=completion)]
    return Group(
        id=number,
        seed=number,
        trajectories=[Trajectory(seed=number, turns=turns, ending=Ending.COMPLETED, reward=1.0)] * 2,
    )


async def test_rollouts_go_on_while_it_is_written_and_are_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, saved = buffer_of_two(), list[tuple[dict[str, Any], dict[str, bytes]]]()
    dispatcher = Dispatcher(
        cast(Any, None),
        buffer,
        Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "c:D"}}),
        collect=collect,
    )
    begun, went_on = threading.Event(), threading.Event()
    fates = ["of then"]

    def slowly(groups: Sequence[Group]) -> bytes:
        begun.set()
        assert went_on.wait(PATIENCE_S), "nothing went on meanwhile"
        return dump_groups(groups)

    async def save(version: int, state: dict[str, Any], attachments: dict[str, bytes], wait: bool) -> None:
        saved.append((state, attachments))

    @asynccontextmanager
    async def deadline(what: str) -> AsyncIterator[None]:
        yield

    run = SimpleNamespace(
        config=SimpleNamespace(
            trainer=SimpleNamespace(checkpoint_interval=1, iterations=9),
            monarch=SimpleNamespace(colocate=None),
        ),
        version=1,
        dispatcher=dispatcher,
        history=SimpleNamespace(state=lambda: list(fates)),
        train_seconds=1.5,
        dataset=None,
        deadline=deadline,
        lend_gpus_to_trainer=nullcontext,
        trainer=SimpleNamespace(save_checkpoint=SimpleNamespace(route=save)),
    )
    monkeypatch.setattr(dispatching, "dump_groups", slowly)
    for number in range(3):
        await buffer.add(group(number))
    async with asyncio.timeout(2 * PATIENCE_S):
        convert_write_errors = asyncio.create_task(Run.checkpoint(cast(Run, run)))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        await buffer.add(group(3))  # one comes, two go, and the run goes on with its books
        await buffer.sample(0, 2)
        fates.append("of now")
        dispatcher.health[""].counts.played = 77
        run.train_seconds = 99.0
        went_on.set()
        await convert_write_errors
    ((state, attachments),) = saved
    assert state["fates"] == ["of then"]
    assert state["seconds"] == 1.5
    assert state["episodes"][""]["played"] == 0
    assert state["ledger"]["finished"] == [0, 1, 2]
    again = buffer_of_two()
    again.restore(state["ledger"], load_groups(attachments["groups"]), served=0)
    assert await again.sample(0, 2) == [group(0), group(1)]
    assert again.ledger.trained == 2
