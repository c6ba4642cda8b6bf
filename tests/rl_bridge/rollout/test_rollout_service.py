"""Rollout workers in processes of their own, under the dispatcher: killed, told to go, and replaced."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from worker_fixtures import HERE, until_no_session_is_left

from openenv_core import LocalProcessProvider
from rl_bridge.buffer.ledger import GroupLease, Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.loops.grpo import collect
from rl_bridge.rollout.assignment import AssignmentResult, sampling_seed
from rl_bridge.rollout.dispatcher import Dispatcher, PlayedGroup
from rl_bridge.types import Group, Trajectory

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

RUN_SEED = 3
SIBLINGS = 4
TASK = "rollout_fixtures:NotebookTask"
GROUPS = 3
WAIT_S = 150.0
"""A bound for what would hang otherwise; none is meant to come near it."""
SILENCE_S = 15.0
"""Less than that: to Monarch a process that dies while it is being asked is silent, not dead."""


@pytest.fixture(autouse=True)
def _prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles can be imported, and a machine that stands still for seconds loses no process: tests count losses."""
    from rl_bridge.services import processes

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(processes, "MIN_SILENCE_S", SILENCE_S)


@pytest.fixture(scope="module")
def notebook() -> Iterator[str]:
    with LocalProcessProvider("rollout_fixtures:notebook_app", cwd=HERE) as provider:
        yield str(provider.url)


class Bridge:
    """Services of a policy and of rollout workers, and the controller's side of the rollouts."""

    def __init__(self, config: Config, rollout: Any, policy: Any, fleet: Any) -> None:
        self.rollout = rollout
        self.policy = policy
        self.fleet = fleet
        self.trained: list[Group] = []
        self.version = 0
        self.buffer = ReplayBuffer(
            Ledger(max_losses=None),
            Admission(groups_per_batch=GROUPS, max_staleness=0, iterations=1000),
            timeout_s=WAIT_S,
            straggler_timeout_s=WAIT_S,
        )
        self.dispatcher = Dispatcher(
            rollout,
            self.buffer,
            config,
            collect=collect,
        )

    async def step(self) -> list[Group]:
        """An iteration of the loop, with a trainer that has nothing to do."""
        groups = await self.buffer.sample(self.version, GROUPS)
        self.trained.extend(groups)
        self.version += 1
        await self.policy.update_weights.fanout(self.version)
        self.dispatcher.record_served(self.version)
        return groups

    def worker_pids(self) -> list[int]:
        return [status.pids[0] for status in self.rollout.replicas if status.state == "serving"]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - it is another process's doing
                await asyncio.sleep(0.02)


@asynccontextmanager
async def bridge(
    url: str,
    checkpoint: Path,
    folder: Path,
    *,
    sessions: int = 8,
    wait_s: float = 0.05,
    checkpoint_on_preemption: bool = False,
    held: frozenset[int] = frozenset(),
) -> AsyncIterator[Bridge]:
    from rollout_roles import SlowPolicy

    from rl_bridge.loops.assembly import WorkerUpdates
    from rl_bridge.rollout.actor import RolloutActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.options import RestartPolicy

    config = Config.model_validate(
        {
            "env": {"url": url, "sessions": 2 * sessions, "reset": {"length": 4}},
            "deterministic": True,
            "seed": RUN_SEED,
            "rollout": {
                "task": TASK,
                "batch_size": GROUPS * SIBLINGS,
                "group_size": SIBLINGS,
                "num_turns": 8,
                "timeout_s": WAIT_S,
                "num_workers": 2,
                "checkpoint_on_preemption": checkpoint_on_preemption,
            },
        }
    )
    restarts = RestartPolicy(budget=20, backoff_s=0.05, max_backoff_s=0.05)
    async with asyncio.timeout(2 * WAIT_S), Fleet(folder / "logs", heartbeat_s=0.2) as fleet:
        policy = await SlowPolicy.options(num_replicas=2, restarts=restarts).as_service(wait_s, held)
        rollout = await RolloutActor.options(num_replicas=2, restarts=restarts).as_service(
            config, folder, checkpoint
        )
        several = config.environment.model_copy(update={"sessions": 4 * SIBLINGS})  # groups in flight: four
        running = Bridge(config.model_copy(update={"env": several}), rollout, policy, fleet)
        worker_updates = WorkerUpdates(on_error=running.buffer.fail)
        worker_updates.tell("take_policy", policy.roster)
        worker_updates.tell("take_servers", {"": (url,)})
        policy.on_roster(lambda roster: worker_updates.tell("take_policy", roster))
        await worker_updates.begin(rollout)
        async with running.dispatcher:
            yield running
        await worker_updates.close()


def tokens(groups: list[Group]) -> list[tuple[int, list[list[int]]]]:
    """What the policy said in each episode of each group: in a deterministic run it follows from the seeds."""
    return [
        (group.id, [[turn.completion.tokens[0] for turn in one.turns] for one in group.trajectories])
        for group in groups
    ]


async def test_killed_workers_lose_no_group_and_train_none_twice(
    notebook: str, tiny_policy: Path, tmp_path: Path
) -> None:
    async with bridge(notebook, tiny_policy, tmp_path / "quiet") as quiet:
        for _ in range(6):
            await quiet.step()
    chance = random.Random(11)
    async with bridge(notebook, tiny_policy, tmp_path / "killed") as running:
        for step in range(6):
            if step in (1, 2, 4):
                await running.until(lambda: len(running.buffer.ledger.leases) >= 2)
                await asyncio.sleep(chance.uniform(0.0, 0.2))
                os.kill(chance.choice(running.worker_pids()), signal.SIGKILL)
            await running.step()
        ledger = running.buffer.ledger
        assert [group.id for group in running.trained] == list(range(6 * GROUPS))
        assert ledger.lost >= 1
        assert not ledger.dropped
        # What was lost was played again as it would have been: same seeds, same answers.
        assert tokens(running.trained) == tokens(quiet.trained)
        await running.until(lambda: len(running.worker_pids()) == 2)
        assert Counter(event.kind for event in running.fleet.events)["restarting"] == 3
        counts = running.dispatcher.counts
        finished = ledger.trained + len(ledger.finished)
        assert (counts.played, counts.retried) == (finished * SIBLINGS, 0)
    await until_no_session_is_left(notebook)


async def test_terminated_worker_hands_on_its_finished_episodes_and_is_replaced(
    notebook: str, tiny_policy: Path, tmp_path: Path
) -> None:
    # Each worker plays one episode after another: it cannot begin the third of a group before two are finished.
    held = frozenset(sampling_seed(RUN_SEED, group, 2, 0) for group in range(GROUPS))
    async with bridge(
        notebook, tiny_policy, tmp_path, sessions=1, checkpoint_on_preemption=True, held=held
    ) as running:
        results: list[AssignmentResult] = []
        settle = running.dispatcher.settle

        async def noting(lease: GroupLease, played: PlayedGroup) -> None:
            results.append(played.result)
            await settle(lease, played)

        running.dispatcher.settle = noting  # type: ignore[method-assign]  # a spy
        while sum((await running.policy.holding.fanout()).values.values()) < 2:  # noqa: ASYNC110 - in other processes
            await asyncio.sleep(0.02)
        going = running.worker_pids()[0]
        os.kill(going, signal.SIGTERM)
        await running.until(lambda: any(result.preempted for result in results))
        await running.policy.release.fanout()
        groups = await running.step()
        assert [group.id for group in groups] == [0, 1, 2]
        assert all(len(group.trajectories) == SIBLINGS for group in groups)
        handed_back = [result for result in results if result.preempted]
        assert handed_back
        kept = [one for result in handed_back for one in result.outcomes if isinstance(one, Trajectory)]
        assert kept  # and nobody has played them again
        ledger = running.buffer.ledger
        assert running.dispatcher.counts.played == (ledger.trained + len(ledger.finished)) * SIBLINGS
        played = sum(len(result.outcomes) for result in results if not result.preempted)
        assert played + len(kept) == GROUPS * SIBLINGS
        assert not ledger.dropped
        await running.until(lambda: len(running.worker_pids()) == 2 and going not in running.worker_pids())
        await running.step()
    await until_no_session_is_left(notebook)
