"""The dispatcher over workers that are simulated: groups that are not trained, and when nothing can be."""

from contextlib import nullcontext

import pytest
from dispatcher_stage import (
    LOST,
    Bridge,
    Workers,
    answer,
    held_out,
    play_altered,
    play_at_once,
    play_in_order,
    steps,
)

from benchmarks.simulated_time import simulated
from rl_bridge.algorithms.advantages import NO_VARIANCE
from rl_bridge.errors import RolloutError
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory
from rl_bridge.types import Ending

DYNAMIC = {"dynamic_sampling": True, "max_refills": 2}


async def agreeing(workers: Workers, assignment: Assignment) -> AssignmentResult:
    """Siblings with equal rewards, in every group."""
    return await play_altered(workers, assignment, reward=0.0)


@simulated
async def test_groups_without_variance_are_trained_once_refills_are_used_up() -> None:
    bridge = Bridge(agreeing, algorithm=DYNAMIC)
    async with bridge.dispatcher:
        # Two for each that is trained.
        assert [group.id for group in await steps(bridge, 0, 2)] == [4, 5, 10, 11]
        assert [group.id for group in await bridge.sample(2)] == [16, 17]
        assert bridge.dispatcher.take_tallies()[""].refused == {NO_VARIANCE: 12}
        state, _ = bridge.dispatcher.state()

    # A resumed run may have another number of groups a step.
    for groups, expected in ((1, [20]), (2, [22, 23]), (3, [24, 25, 26])):
        resumed = Bridge(agreeing, groups=groups, algorithm=DYNAMIC)
        resumed.workers.version = 3
        await resumed.dispatcher.rewind(3, state)
        async with resumed.dispatcher:
            assert [group.id for group in await resumed.sample(3)] == expected
            assert resumed.dispatcher.take_tallies()[""].refused == {NO_VARIANCE: 2 * groups}


@simulated
async def test_groups_without_enough_siblings_are_dropped_and_replaced() -> None:
    def mostly_lost(assignment: Assignment) -> AssignmentResult:
        unscored = NoTrajectory(absence=Absence.UNSCORED, reason="the judge slept")
        done, *_ = answer(assignment).outcomes
        outcomes = (done, LOST, LOST, unscored)
        return answer(assignment, outcomes=outcomes, retried=6, last_failure=LOST.reason)

    bridge = Bridge(play_in_order(None, mostly_lost))
    async with bridge.dispatcher:
        groups = await bridge.sample()
    assert [group.id for group in groups] == [0, 2]
    assert bridge.buffer.ledger.dropped == {"too few siblings: 2 dropped, 1 played, 1 unscored": 1}
    counts = bridge.dispatcher.counts
    assert (counts.retried, counts.dropped, counts.unscored) == (6, 2, 1)
    assert counts.last_failure == LOST.reason


FAILED = NoTrajectory(
    absence=Absence.DROPPED, reason="ExecutionError: the environment raised", ending=Ending.FAILED_ENVIRONMENT
)


@simulated
@pytest.mark.parametrize(("lost", "ends"), [(2, False), (3, True)])
async def test_run_that_loses_most_episodes_ends_though_the_others_could_be_trained(
    lost: int, ends: bool
) -> None:
    def how(assignment: Assignment) -> AssignmentResult:
        return answer(
            assignment,
            outcomes=answer(assignment).outcomes[lost:] + (FAILED,) * lost,
            retried=3 * lost,
            last_failure=FAILED.reason,
        )

    bridge = Bridge(play_in_order(None, *[how] * 40), slots=1, min_group_size=1)
    message = r"at most 50% .*max_lost_share.*got 66% of the last 8 .*raised"
    async with bridge.dispatcher:
        with pytest.raises(RolloutError, match=message) if ends else nullcontext():
            await steps(bridge, 0, 10)


@simulated
async def test_environment_that_takes_no_step_ends_the_run_whatever_else_is_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    explained: list[str] = []

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        played = (await play_altered(workers, assignment, ending=Ending.ILLEGAL)).outcomes
        return answer(assignment, outcomes=(*played[1:], FAILED), retried=3, last_failure=FAILED.reason)

    async def traceback(environment: str) -> str:
        explained.append(environment)
        return "Traceback (most recent call last):\nKeyError: 'price'"

    bridge = Bridge(how, groups=8, slots=8, explain=traceback)
    async with bridge.dispatcher:
        await bridge.sample(0)
        with pytest.raises(RolloutError, match=r"not taken a single step: 8 of 32 episodes failed .* raised"):
            await bridge.sample(1)
    (line,) = caplog.messages
    assert "the environment raised\nTraceback (most recent call last):\nKeyError: 'price'" in line
    assert explained == [""]


@simulated
async def test_task_whose_actions_are_all_refused_ends_the_run_within_a_step() -> None:
    refusing = True

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        if not refusing:
            return await play_at_once(workers, assignment)
        return await play_altered(workers, assignment, ending=Ending.REFUSED_ACTION, refusal="no such field")

    async with Bridge(how).dispatcher as dispatcher:
        with pytest.raises(RolloutError, match=r"none of 4 episodes"):
            await held_out(dispatcher, 4)
        assert await held_out(dispatcher, 4, understood=True) == 4
        assert await held_out(dispatcher, 0) == 0
    bridge = Bridge(how)
    async with bridge.dispatcher:
        with pytest.raises(RolloutError, match=r"none of 8 episodes .*The last refusal: no such field"):
            await steps(bridge, 0, 3)
    # Once one was taken, refusals are the policy's doing; a checkpoint knows that too.
    refusing = False
    bridge = Bridge(how)
    async with bridge.dispatcher:
        await bridge.sample(0)
        refusing = True
        bridge.serve(1)
        old = bridge.dispatcher.state()[0]
        await bridge.sample(1)
        assert await held_out(bridge.dispatcher, 4) == 4
        await bridge.dispatcher.rewind(1, old)
        assert bridge.dispatcher.counts.understood


@simulated
async def test_held_out_episodes_end_with_the_policy_and_not_with_some_losses() -> None:
    gone: set[int] = set()

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        if assignment.seeds[0] in gone:
            failed = NoTrajectory(absence=Absence.DROPPED, reason="status 503", ending=Ending.FAILED_POLICY)
            return answer(assignment, outcomes=(failed,) * len(assignment.seeds))
        return await play_at_once(workers, assignment)

    async with Bridge(how, slots=1).dispatcher as dispatcher:
        gone = {0, 8}
        assert await held_out(dispatcher, 16) == 16
        gone = set(range(16))
        with pytest.raises(RolloutError, match="failed in 8 held-out episodes in a row: status 503"):
            await held_out(dispatcher, 16)
