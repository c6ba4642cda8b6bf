"""Rollout workers in processes of their own, under the dispatcher: terminated, killed, and replaced."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from serving import eventually
from worker_fixtures import HERE, until_no_session_is_left

from openenv_core import LocalProcessProvider
from rl_bridge.buffer.ledger import GroupLease, Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.buffer.stored import token_key
from rl_bridge.config import Config
from rl_bridge.loops.grpo import collect
from rl_bridge.rollout.assignment import AssignmentResult, sampling_seed
from rl_bridge.rollout.dispatcher import Dispatcher, PlayedGroup
from rl_bridge.services import processes
from rl_bridge.types import Group, Trajectory

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("importable_modules"),
]

RUN_SEED = 3
SIBLINGS = 4
GROUPS = 3
WAIT_S = 150.0
"""A bound for what would hang otherwise; none is meant to come near it."""


def config_of(url: str, *, sessions: int) -> Config:
    return Config.model_validate(
        {
            "env": {"url": url, "sessions": sessions, "reset": {"length": 4}},
            "deterministic": True,
            "seed": RUN_SEED,
            "rollout": {
                "task": "rollout_fixtures:NotebookTask",
                "batch_size": GROUPS * SIBLINGS,
                "group_size": SIBLINGS,
                "num_turns": 8,
                "timeout_s": WAIT_S,
                "num_workers": 2,
                "checkpoint_on_preemption": True,
            },
        }
    )


async def test_terminated_worker_hands_on_its_finished_episodes_and_is_replaced(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a killed worker was playing is played again."""
    from rollout_roles import SlowPolicy, TokenKeeper

    from rl_bridge.loops.assembly import ServiceUpdates
    from rl_bridge.rollout.actor import RolloutActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.restarts import RestartPolicy

    # A machine that stands still for seconds loses no process; one that dies while it is asked is silent to Monarch.
    monkeypatch.setattr(processes, "MIN_SILENCE_S", 15.0)
    # Each worker plays one episode after another: it cannot begin the third of a group before two are finished.
    held = frozenset(sampling_seed(RUN_SEED, group, 2, 0) for group in range(GROUPS))
    restarts = RestartPolicy(budget=20, backoff_s=0.05, max_backoff_s=0.05)
    buffer = ReplayBuffer(
        Ledger(max_losses=None),
        Admission(groups_per_batch=GROUPS, max_staleness=0, iterations=1000),
        timeout_s=WAIT_S,
        straggler_timeout_s=WAIT_S,
    )
    ledger, results = buffer.ledger, list[AssignmentResult]()

    class Noting(Dispatcher):
        async def settle(self, lease: GroupLease, played: PlayedGroup) -> None:
            results.append(played.result)
            await super().settle(lease, played)

    with LocalProcessProvider("rollout_fixtures:notebook_app", cwd=HERE) as provider:
        url = str(provider.url)
        async with asyncio.timeout(2 * WAIT_S), Fleet(tmp_path / "logs", heartbeat_s=0.2) as fleet:
            policy = await SlowPolicy.options(num_replicas=2, restarts=restarts).as_service(held)
            rollout = await RolloutActor.options(num_replicas=2, restarts=restarts).as_service(
                config_of(url, sessions=2), tmp_path, tiny_policy
            )
            dispatcher = Noting(rollout, buffer, config_of(url, sessions=4 * SIBLINGS), collect=collect)
            worker_updates = ServiceUpdates(on_error=buffer.fail)
            keeper = await TokenKeeper.as_service()
            worker_updates.tell("take_trainer", keeper.roster.of_first_ranks())
            worker_updates.tell("take_policy", policy.roster)
            worker_updates.tell("take_servers", {"": (url,)})
            policy.on_roster(lambda roster: worker_updates.tell("take_policy", roster))
            await worker_updates.begin(rollout)

            async def step(version: int) -> list[int]:
                """An iteration of the loop, with a trainer that has nothing to do."""
                groups: list[Group] = await buffer.sample(version, GROUPS)
                assert all(len(group.trajectories) == SIBLINGS for group in groups)
                # Whoever played them and has been killed since: the tokens are where the trainer is.
                trajectories = [one for group in groups for one in group.trajectories]
                tokens = await keeper.get_tokens.route([token_key(one) for one in trajectories])
                assert all(not one.turns for one in trajectories)
                assert [len(one.logprobs) for one in tokens] == [
                    one.summarize().tokens for one in trajectories
                ]
                await policy.update_weights.fanout(version + 1)
                dispatcher.record_served(version + 1)
                return [group.id for group in groups]

            def pids() -> list[int]:
                return [status.pids[0] for status in rollout.replicas if status.state == "serving"]

            async with dispatcher:
                while sum((await policy.holding.fanout()).values.values()) < 2:  # noqa: ASYNC110 - in other processes
                    await asyncio.sleep(0.02)
                going = pids()[0]
                os.kill(going, signal.SIGTERM)
                await eventually(lambda: any(result.preempted for result in results))
                await policy.release.fanout()
                assert await step(0) == [0, 1, 2]
                handed_back = [one for result in results if result.preempted for one in result.outcomes]
                finished = [one for one in handed_back if isinstance(one, Trajectory)]
                assert finished  # and nobody has played them again
                assert dispatcher.counts.played == (ledger.trained + len(ledger.finished)) * SIBLINGS
                played = sum(len(result.outcomes) for result in results if not result.preempted)
                assert played + len(finished) == GROUPS * SIBLINGS
                await eventually(lambda: len(pids()) == 2 and going not in pids())

                assert await step(1) == [3, 4, 5]
                await eventually(lambda: len(ledger.leases) >= 2)
                lost = ledger.lost
                os.kill(pids()[0], signal.SIGKILL)
                assert await step(2) == [6, 7, 8]
                assert ledger.lost > lost
                assert not ledger.dropped
                finished_groups = ledger.trained + len(ledger.finished)
                assert dispatcher.counts.played == finished_groups * SIBLINGS
                await eventually(lambda: len(pids()) == 2)
                assert [event.kind for event in fleet.events].count("restarting") == 2
            await worker_updates.close()
        await until_no_session_is_left(url)
