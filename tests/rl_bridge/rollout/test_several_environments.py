"""Several environments in one run: shares by weight, the same ones after a resumption, and one that is down."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dispatcher_stage import (
    LOST,
    Bridge,
    Play,
    Workers,
    answer,
    hand_back,
    play_altered,
    play_at_once,
    steps,
)
from rich.console import Console
from serving import eventually

from benchmarks.simulated_time import simulated
from openenv_core.evaluation.records import EpisodeRecord, EvaluationFolder
from rl_bridge.config import Config
from rl_bridge.errors import ReplicaLostError, RoleError, RolloutError
from rl_bridge.loops import evaluation
from rl_bridge.loops.evaluation import evaluate, result_of, summary_of
from rl_bridge.rollout.assignment import (
    TRAINING_SEEDS,
    Assignment,
    AssignmentResult,
    NoTrajectory,
    draw_environment,
    held_out_seeds,
    task_seed,
)
from rl_bridge.rollout.groups import FIRST_SUSPENSION_S
from rl_bridge.types import Ending

WEIGHTS = {"blackjack": 3.0, "shop": 1.0}


def within_binomial_interval(draws: Counter[str], *, share: float) -> bool:
    """Within 99.99% of it."""
    count = draws.total()
    return abs(draws["blackjack"] / count - share) < 3.9 * sqrt(share * (1 - share) / count)


def test_draws_keep_to_weights_and_seed() -> None:
    draws = [draw_environment(7, group, WEIGHTS) for group in range(4000)]
    assert within_binomial_interval(Counter(draws), share=0.75)
    assert draws == [draw_environment(7, group, WEIGHTS) for group in range(4000)]
    assert draws != [draw_environment(8, group, WEIGHTS) for group in range(4000)]
    # The deals of an environment are not those that its draws leave over: both say something of their own.
    deals = [task_seed(7, group) for group in range(4000)]
    of_blackjack = [deal for deal, name in zip(deals, draws, strict=True) if name == "blackjack"]
    assert abs(sum(deal < 2**30 for deal in of_blackjack) / len(of_blackjack) - 0.5) < 0.04
    assert {draw_environment(7, group, {"shop": 0.1}) for group in range(99)} == {"shop"}


@simulated
async def test_siblings_handed_on_stay_in_their_environment_and_lost_groups_come_back_to_it() -> None:
    """Also where it is set aside meanwhile."""

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        number = len(workers.assignments)
        await asyncio.sleep(1.0)
        if number <= 8:
            if assignment.environment == "shop":
                bridge.dispatcher.suspend("shop", RolloutError("down"))
            return hand_back(assignment)
        if number <= 13:
            raise ReplicaLostError("killed")
        return await play_at_once(workers, assignment)

    bridge = Bridge(how, groups=8, slots=8, weights=WEIGHTS, max_losses=None)
    async with bridge.dispatcher:
        groups = await bridge.sample()
    assert [group.environment for group in groups] == [draw_environment(7, n, WEIGHTS) for n in range(8)]
    assert {(a.task, a.environment) for a in bridge.workers.assignments[:21]} == {
        (group.id, group.environment) for group in groups
    }
    assert bridge.buffer.ledger.lost == 5


async def dull_where_even(workers: Workers, assignment: Assignment) -> AssignmentResult:
    """Groups of tasks with even seeds have rewards without variance; which comes back first is chance."""
    await asyncio.sleep(random.uniform(1.0, 9.0))
    even = assignment.seeds[0] % 2 == 0
    return await (
        play_altered(workers, assignment, reward=1.0) if even else play_at_once(workers, assignment)
    )


@pytest.mark.parametrize(
    ("how", "options"),
    [
        (play_at_once, {"max_staleness": 2}),
        (dull_where_even, {"slots": 16, "tasks": 12, "deterministic": True}),
    ],
)
@simulated
async def test_groups_of_a_run_and_of_its_resumption_are_those_of_a_run_in_one_go(
    how: Play, options: dict[str, Any]
) -> None:
    """With their environments and seeds: also where outcomes steer which tasks are drawn."""
    whole, first, resumed = (Bridge(how, groups=8, weights=WEIGHTS, **options) for _ in range(3))
    async with whole.dispatcher:
        expected = await steps(whole, 0, 60)
    assert within_binomial_interval(Counter(group.environment for group in expected), share=0.75)
    async with first.dispatcher:
        groups = await steps(first, 0, 25)
        await eventually(lambda: len(first.buffer))  # some groups of the next step are back, others are not
        assert first.buffer.ledger.leases
        state, _ = first.dispatcher.state()
    resumed.workers.version = 25
    await resumed.dispatcher.rewind(25, json.loads(json.dumps(state)))
    assert resumed.dispatcher.health["shop"].counts == first.dispatcher.health["shop"].counts
    async with resumed.dispatcher:
        groups += await steps(resumed, 25, 60)
        for name, sampler in resumed.dispatcher.samplers.items():
            assert sampler.state() == whole.dispatcher.samplers[name].state()
    assert [(group.id, group.environment, group.seed) for group in groups] == [
        (group.id, group.environment, group.seed) for group in expected
    ]
    for name, sampler in resumed.dispatcher.samplers.items():
        late = [group.seed % 2 for group in expected[160:] if group.environment == name]
        assert sum(late) / len(late) > 0.75  # with all tasks alike it were a half
        await resumed.dispatcher.rewind(0, None)
        assert sampler.metrics()["tasks/draws_max"] == 0


@simulated
async def test_group_outcome_counts_for_its_own_environment() -> None:
    bridge = Bridge(dull_where_even, groups=4, weights=WEIGHTS, tasks=12)
    samplers = bridge.dispatcher.samplers
    for group in range(4):  # as of groups that were lost, and their environment set aside since
        for sampler in samplers.values():
            sampler.draw(group, known=0)
    async with bridge.dispatcher:
        played = Counter(group.environment for group in await bridge.sample())
    for name, sampler in samplers.items():
        state = sampler.state()
        assert (state["drawn"], len(state["results"])) == ([], played[name])


def down(assignment: Assignment) -> AssignmentResult:
    lost = NoTrajectory(absence=LOST.absence, reason=f"{assignment.environment} is down")
    return answer(assignment, outcomes=(lost,) * len(assignment.seeds), last_failure=lost.reason)


@simulated
async def test_environment_that_is_down_is_set_aside_tried_again_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead = {"shop"}

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        await asyncio.sleep(1.0)
        return down(assignment) if assignment.environment in dead else await play_at_once(workers, assignment)

    bridge = Bridge(how, groups=4, weights=WEIGHTS)
    async with bridge.dispatcher:
        groups = await steps(bridge, 0, 20)
        assert {group.environment for group in groups} == {"blackjack"}
        lost = bridge.buffer.ledger.dropped.total()
        assert lost >= 8, "it was given up before as many groups were lost as a run is given up for"
        (warning,) = [line for line in caplog.messages if "is set aside" in line]
        assert (
            "the environment shop is set aside, and tried again in a while; the run goes on with" in warning
        )
        assert "shop is down" in warning
        # Its groups are given to the others meanwhile.
        groups = await steps(bridge, 20, 25)
        assert bridge.buffer.ledger.dropped.total() == lost
        # After the pause it is tried, and set aside by its first loss: for twice as long.
        await asyncio.sleep(FIRST_SUSPENSION_S)
        await steps(bridge, 25, 45)
        again = bridge.buffer.ledger.dropped.total()
        assert lost < again <= lost + 4
        await asyncio.sleep(FIRST_SUSPENSION_S)
        await steps(bridge, 45, 50)
        assert bridge.buffer.ledger.dropped.total() == again
        dead.clear()
        await asyncio.sleep(FIRST_SUSPENSION_S)
        groups = await steps(bridge, 50, 100)
        assert within_binomial_interval(Counter(group.environment for group in groups), share=0.75)
        assert bridge.dispatcher.health["blackjack"].counts.dropped == 0
        assert bridge.dispatcher.health["shop"].counts.dropped == 4 * bridge.buffer.ledger.dropped.total()
        dead.update(WEIGHTS)
        with pytest.raises(RolloutError, match="is down"):
            await steps(bridge, 100, 110)
        assert all(one.error is not None for one in bridge.dispatcher.health.values())


def run_of(bridge: Bridge, episodes: int) -> Any:
    envs = {name: {"app": "a:b"} for name in bridge.config.environments}
    keys = {"env": envs.get("", envs), "rollout": {"task": "c:D"}, "evaluation": {"episodes": episodes}}
    return SimpleNamespace(
        config=Config.model_validate(keys), console=Console(quiet=True), dispatcher=bridge.dispatcher
    )


def test_interval_of_held_out_episodes_follows_the_range_of_their_environment() -> None:
    envs = {name: {"app": f"envs.{name}_env.server.app:app"} for name in WEIGHTS}
    keys = {"env": envs, "rollout": {"task": "c:D"}, "evaluation": {"episodes": 2}}
    records = [
        EpisodeRecord(
            environment="", group=seed, sibling=0, seed=seed, ending="completed", reward=float(seed)
        )
        for seed in (0, 1)
    ]
    found = evaluation.summaries_of(Config.model_validate(keys), dict.fromkeys(WEIGHTS, records))
    assert [found[name]["reward_range"] for name in WEIGHTS] == [(-1.0, 1.5), (0.0, 1.0)]
    assert found["blackjack"]["ci95"][1] > 1.0 >= found["shop"]["ci95"][1]


@simulated
async def test_servers_that_are_gone_for_good_are_neither_tried_again_nor_evaluated_on(
    tmp_path: Path,
) -> None:
    bridge = Bridge(play_at_once, groups=8, weights=WEIGHTS)
    run = run_of(bridge, 10)
    async with bridge.dispatcher as dispatcher:
        results = await evaluate(run, tmp_path / "whole")
        assert [summary_of({"": results[name]})["episodes"] for name in WEIGHTS] == [10, 10]
        assert {
            (a.environment, a.settings.reset_options["of"]) for a in bridge.workers.assignments if a.lease < 0
        } == {("blackjack", "blackjack"), ("shop", "shop")}

        await bridge.sample(0)
        dispatcher.suspend("shop", RoleError("its budget is gone"), permanently=True)
        await asyncio.sleep(1e5)
        bridge.serve(1)
        assert {group.environment for group in await steps(bridge, 1, 20)} == {"blackjack"}
        await dispatcher.rewind(20, None)
        assert {group.environment for group in await steps(bridge, 20, 40)} == {"blackjack"}
        results = await evaluate(run, tmp_path / "half")
        lost = result_of(results["shop"], train_seconds=3.0)
        assert (len(results["blackjack"]), lost.rewards, lost.dropped) == (10, [], 10)
        assert "its budget is gone" in str(results["shop"][-1].reason)
        assert (summary_of(results)["episodes"], summary_of(results)["dropped"]) == (10, 10)

        with pytest.raises(RoleError, match="the other too"):
            dispatcher.suspend("blackjack", RoleError("the other too"), permanently=True)
        with pytest.raises(RolloutError, match="gone"):
            await evaluate(run, tmp_path / "none")


@simulated
async def test_evaluation_goes_on_with_what_the_same_policy_has_not_played(tmp_path: Path) -> None:
    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        if failing and assignment.seeds[0] % 8 == 0:
            lost = replace(LOST, ending=Ending.FAILED_ENVIRONMENT)
            return answer(assignment, outcomes=(lost,) * len(assignment.seeds))
        if failing == "at last" and assignment.seeds[0] % 16 == 12:
            raise RolloutError("the worker's own mistake")
        return await play_at_once(workers, assignment)

    bridge = Bridge(how, slots=1, iterations=0)
    run = run_of(bridge, 20)

    async def played(**which: Any) -> list[int]:
        before = len(bridge.workers.assignments)
        results = (await evaluate(run, tmp_path, **which))[""]
        assert [one.group for one in results] == [*range(20)]
        assert {one.seed for one in results} == set(held_out_seeds(0, 20))
        assert {one.version for one in results} == {which.get("version", 0)}
        assert [one for one in results if one.reward is None] == [] or failing
        seeds = [seed for one in bridge.workers.assignments[before:] for seed in one.seeds]
        return [seed - TRAINING_SEEDS for seed in seeds]

    async with bridge.dispatcher:
        failing = "some"
        assert await played() == [*range(20)]
        lost = [*range(4), *range(8, 12), *range(16, 20)]
        assert await played() == lost  # though nothing but these fails, it is known to take actions
        failing = ""
        assert await played() == lost
        assert await played() == []
        failing = "at last"
        with pytest.raises(RolloutError, match="own mistake"):
            await played(version=3)
        failing = ""
        assert await played(version=3) == [*range(4), *range(8, 20)]
        assert len(EvaluationFolder(tmp_path).read().records) == 20
