"""The history of groups, and checkpoints whose parts all belong to one moment."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.buffer.stored import load_groups
from rl_bridge.config import Config
from rl_bridge.loops.grpo import collect
from rl_bridge.loops.run import HISTORY_FILE, GroupHistory, Run
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.tokens.arrays import TokenKey
from rl_bridge.types import Ending, Group, Trajectory, TurnSummary


def drop(ledger: Ledger, count: int) -> None:
    for _ in range(count):
        lease = ledger.lease(served=0, now=0.0, admit=True)
        assert lease is not None
        ledger.drop(lease.id, "no reward")


def rows(folder: Path) -> list[dict[str, dict[str, str]]]:
    return [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]


def test_fates_in_a_checkpoint_are_logged_once_by_the_resumed_run(tmp_path: Path) -> None:
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


HANG_S = 60.0


def buffer_of_two() -> ReplayBuffer:
    admission = Admission(groups_per_batch=2, max_staleness=1, iterations=9)
    return ReplayBuffer(Ledger(max_losses=None), admission, timeout_s=9.0, straggler_timeout_s=9.0)


def group(number: int) -> Group:
    siblings = [
        Trajectory(
            seed=number,
            ending=Ending.COMPLETED,
            reward=1.0,
            summary=TurnSummary(turns=1, tokens=1, version=0, stopped=True, lease=number, sibling=sibling),
        )
        for sibling in range(2)
    ]
    return Group(id=number, seed=number, trajectories=siblings)


async def test_rollouts_continue_while_a_checkpoint_is_written_and_are_not_in_it() -> None:
    buffer, saved = buffer_of_two(), list[tuple[dict[str, Any], list[TokenKey]]]()
    dispatcher = Dispatcher(
        cast(Any, None),
        buffer,
        Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "c:D"}}),
        collect=collect,
    )
    saving, may_go_on = asyncio.Event(), asyncio.Event()
    fates = ["of then"]

    async def save(version: int, state: dict[str, Any], tokens: list[TokenKey], wait: bool) -> None:
        saving.set()
        await may_go_on.wait()
        saved.append((state, tokens))

    @asynccontextmanager
    async def deadline(what: str) -> AsyncIterator[None]:
        yield

    run = SimpleNamespace(
        config=SimpleNamespace(
            trainer=SimpleNamespace(checkpoint_interval=1, export_interval=0, iterations=9),
            self_play=SimpleNamespace(pool_interval=0),
            monarch=SimpleNamespace(colocate=None),
        ),
        version=1,
        dispatcher=dispatcher,
        history=SimpleNamespace(state=lambda: list(fates)),
        train_seconds=1.5,
        dataset=None,
        opponents=None,
        deadline=deadline,
        lend_gpus_to_trainer=nullcontext,
        trainer=SimpleNamespace(save_checkpoint=SimpleNamespace(route=save)),
    )
    for number in range(3):
        await buffer.add(group(number))
    async with asyncio.timeout(2 * HANG_S):
        write_task = asyncio.create_task(Run.checkpoint(cast(Run, run)))
        await saving.wait()
        await buffer.add(group(3))  # one comes, two go, and the run goes on with its books
        await buffer.sample(0, 2)
        fates.append("of now")
        dispatcher.health[""].counts.played = 77
        run.train_seconds = 99.0
        may_go_on.set()
        await write_task
    ((state, tokens),) = saved
    assert tokens == [(number, sibling) for number in range(3) for sibling in range(2)]
    assert state["fates"] == ["of then"]
    assert state["seconds"] == 1.5
    assert state["episodes"][""]["played"] == 0
    assert state["ledger"]["finished"] == [0, 1, 2]
    again = buffer_of_two()
    again.restore(state["ledger"], load_groups(state["groups"]), served=0)
    assert await again.sample(0, 2) == [group(0), group(1)]
    assert again.ledger.trained == 2
