"""The dispatcher over workers that are simulated: groups that are not trained, and when nothing can be."""

import asyncio

import pytest
from dispatcher_stage import EPISODE, LOST, SIBLINGS, Bridge, Workers, answer, at_once
from simulated_time import simulate

from rl_bridge.errors import ReplicaLost, RolloutError
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory
from rl_bridge.rollout.filters import ALL_TRUNCATED, NO_VARIANCE, GroupFilter, Overlong
from rl_bridge.types import Ending, Trajectory


async def agreeing(workers: Workers, assignment: Assignment) -> AssignmentResult:
    """Siblings with equal rewards, in every group."""
    result = await at_once(workers, assignment)
    for outcome in result.outcomes:
        assert isinstance(outcome, Trajectory)
        outcome.reward = 0.0
    return result


async def agreeing_unless_third(workers: Workers, assignment: Assignment) -> AssignmentResult:
    """Siblings with equal rewards, but for every third group."""
    result = await at_once(workers, assignment)
    if assignment.group is not None and assignment.group % 3 < 2:
        for outcome in result.outcomes:
            assert isinstance(outcome, Trajectory)
            outcome.reward = 1.0
    return result


def test_groups_that_are_not_worth_training_are_replaced_and_counted() -> None:
    async def scenario() -> None:
        bridge = Bridge(agreeing_unless_third, group_filter=GroupFilter(dynamic=True, refills=6))
        async with bridge.dispatcher:
            for version, expected in enumerate([[2, 5], [8, 11]]):
                assert [group.id for group in await bridge.sample(version)] == expected
                tally = bridge.dispatcher.take_tally()
                assert tally.refused == {NO_VARIANCE: 4}
                assert tally.endings == {Ending.COMPLETED: 4 * SIBLINGS}
                assert bridge.dispatcher.take_tally().refused == {}
                bridge.serve(version + 1)
        assert bridge.buffer.ledger.dropped == {NO_VARIANCE: 8}
        assert bridge.buffer.ledger.trained == 4
        assert bridge.dispatcher.counts.played == 12 * SIBLINGS  # they were played all the same

    simulate(scenario())


def test_groups_that_are_never_worth_training_are_trained_once_refills_are_used_up() -> None:
    async def scenario() -> None:
        bridge = Bridge(agreeing, group_filter=GroupFilter(dynamic=True, refills=4))
        async with bridge.dispatcher:
            assert [group.id for group in await bridge.sample(0)] == [4, 5]
            bridge.serve(1)
            # Two for each that is trained.
            assert [group.id for group in await bridge.sample(1)] == [10, 11]
            bridge.serve(2)
            assert [group.id for group in await bridge.sample(2)] == [16, 17]
            assert bridge.dispatcher.take_tally().refused == {NO_VARIANCE: 12}
            state, attachments = bridge.dispatcher.state()

        # A resumed run may have another number of groups a step.
        for groups, expected in ((1, [20]), (2, [22, 23]), (3, [24, 25, 26])):
            resumed = Bridge(
                agreeing, groups=groups, group_filter=GroupFilter(dynamic=True, refills=2 * groups)
            )
            resumed.workers.version = 3
            await resumed.dispatcher.rewind(3, state, attachments())
            async with resumed.dispatcher:
                assert [group.id for group in await resumed.sample(3)] == expected
                assert resumed.dispatcher.take_tally().refused == {NO_VARIANCE: 2 * groups}

    simulate(scenario())


def test_a_step_cannot_use_the_refills_that_those_before_it_left() -> None:
    async def scenario() -> None:
        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            result = await at_once(workers, assignment)
            for place, outcome in enumerate(result.outcomes):
                assert isinstance(outcome, Trajectory)
                # All agree once the first weights have been trained.
                outcome.reward = float(place) if workers.version == 0 else 0.0
            return result

        bridge = Bridge(how, group_filter=GroupFilter(dynamic=True, refills=4))
        async with bridge.dispatcher:
            assert [group.id for group in await bridge.sample(0)] == [0, 1]
            bridge.serve(1)
            assert [group.id for group in await bridge.sample(1)] == [6, 7]
            assert bridge.dispatcher.take_tally().refused == {NO_VARIANCE: 4}

    simulate(scenario())


def test_a_group_that_is_played_again_has_the_refills_of_its_step() -> None:
    """In whichever order groups come back, and whoever is lost meanwhile, the same ones are refused."""

    async def scenario() -> None:
        lost = {1, 5}

        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            if assignment.group in lost:
                lost.discard(assignment.group)
                raise ReplicaLost("killed")
            return await agreeing(workers, assignment)

        bridge = Bridge(how, group_filter=GroupFilter(dynamic=True, refills=4))
        async with bridge.dispatcher:
            assert sorted(group.id for group in await bridge.sample(0)) == [4, 5]
            assert not lost

    simulate(scenario())


def test_groups_of_which_nothing_is_left_to_train_end_the_run() -> None:
    async def scenario() -> None:
        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            result = await at_once(workers, assignment)
            for outcome in result.outcomes:
                assert isinstance(outcome, Trajectory)
                outcome.ending = Ending.TRUNCATED_LENGTH
            return result

        bridge = Bridge(how, group_filter=GroupFilter(overlong=Overlong(handling="mask")))
        async with bridge.dispatcher:
            with pytest.raises(RolloutError, match=r"none of the last 8 groups.*had all siblings truncated$"):
                await bridge.sample()
        assert bridge.buffer.ledger.dropped == {ALL_TRUNCATED: 8}
        assert bridge.dispatcher.take_tally().endings == {Ending.TRUNCATED_LENGTH: 8 * SIBLINGS}

    simulate(scenario())


def test_failures_are_tallied_by_whose_they_are() -> None:
    async def scenario() -> None:
        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            first, second, third, _ = (await at_once(workers, assignment)).outcomes
            failed = NoTrajectory(absence=Absence.UNSCORED, reason="", ending=Ending.FAILED_REWARD)
            return AssignmentResult(lease=assignment.lease, outcomes=(first, second, third, failed))

        bridge = Bridge(how)
        async with bridge.dispatcher:
            await bridge.sample()
            assert bridge.dispatcher.take_tally().endings == {Ending.FAILED_REWARD: 2}

    simulate(scenario())


def test_groups_without_enough_siblings_are_dropped_and_replaced() -> None:
    async def scenario() -> None:
        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            if len(workers.assignments) != 2:
                return await at_once(workers, assignment)
            unscored = NoTrajectory(absence=Absence.UNSCORED, reason="the judge slept")
            done, *_ = answer(assignment).outcomes
            return AssignmentResult(
                lease=assignment.lease,
                outcomes=(done, LOST, LOST, unscored),
                retried=6,
                last_failure=LOST.reason,
            )

        bridge = Bridge(how)
        async with bridge.dispatcher:
            groups = await bridge.sample()
        assert [group.id for group in groups] == [0, 2]
        assert bridge.buffer.ledger.dropped == {"too few siblings: 2 dropped, 1 played, 1 unscored": 1}
        counts = bridge.dispatcher.counts
        assert (counts.retried, counts.dropped, counts.unscored) == (6, 2, 1)
        assert (counts.last_failure, counts.last_unscored) == (LOST.reason, "the judge slept")

    simulate(scenario())


def test_where_nothing_can_be_used_any_more_the_run_ends_and_says_why() -> None:
    async def scenario() -> None:
        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            if len(workers.assignments) <= 4:  # once is no reason to end: a success in between counts
                return await at_once(workers, assignment)
            await asyncio.sleep(1.0)
            return AssignmentResult(lease=assignment.lease, outcomes=(LOST,) * SIBLINGS)

        bridge = Bridge(how, slots=1)
        async with bridge.dispatcher:
            for version in range(2):
                await bridge.sample(version)
                bridge.serve(version + 1)
            with pytest.raises(RolloutError, match=r"none of the last 8 .* 4 dropped; .*the server is gone"):
                await bridge.sample(2)
        assert len(bridge.workers.assignments) == 12

    simulate(scenario())


def test_an_error_that_is_no_loss_reaches_the_loop() -> None:
    async def scenario() -> None:
        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            raise ZeroDivisionError("the task is wrong")

        bridge = Bridge(how)
        async with bridge.dispatcher:
            with pytest.raises(ZeroDivisionError, match="the task is wrong"):
                await bridge.sample()

    simulate(scenario())


def test_a_worker_that_dies_with_many_groups_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def dies_at_first(workers: Workers, assignment: Assignment) -> AssignmentResult:
        await asyncio.sleep(1.0)
        if len(workers.assignments) <= 20:
            raise ReplicaLost("replica 0 of rollout is lost")
        return answer(assignment)

    bridge = Bridge(dies_at_first, groups=20, slots=20)

    async def work() -> None:
        async with bridge.dispatcher:
            await bridge.buffer.sample(0, 20)

    simulate(work())
    (line,) = caplog.messages
    assert line == "work was lost, on 20 group(s) (0, 1, 2, 3, 4, 5, 6, 7, …): replica 0 of rollout is lost"


def test_a_task_whose_actions_are_all_refused_ends_the_run_within_a_step() -> None:
    async def scenario() -> None:
        refusing = True

        async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
            result = await at_once(workers, assignment)
            for outcome in result.outcomes:
                assert isinstance(outcome, Trajectory)
                if refusing:
                    outcome.ending, outcome.refusal = Ending.REFUSED_ACTION, "no such field"
            return result

        async def steps(bridge: Bridge, begin: int, end: int) -> None:
            for version in range(begin, end):
                await bridge.sample(version)
                bridge.serve(version + 1)

        bridge = Bridge(how)
        async with bridge.dispatcher:
            with pytest.raises(RolloutError, match=r"none of 8 episodes .*The last refusal: no such field"):
                await steps(bridge, 0, 3)
        bridge = Bridge(how)
        async with bridge.dispatcher:
            refused = bridge.dispatcher.play_held_out(range(4), EPISODE, timeout_s=9.0)
            with pytest.raises(RolloutError, match=r"none of 4 episodes"):
                await refused
            assert await bridge.dispatcher.play_held_out((), EPISODE, timeout_s=9.0) == []
        refusing = False
        bridge = Bridge(how)
        async with bridge.dispatcher:
            await steps(bridge, 0, 1)
            old = bridge.dispatcher.state()[0]
            refusing = True
            await steps(bridge, 1, 4)
            assert len(await bridge.dispatcher.play_held_out(range(4), EPISODE, timeout_s=9.0)) == 4
            # A checkpoint from when no run survived a refusal.
            for name in ("understood", "refused", "last_refusal"):
                del old["episodes"][name]
            await bridge.dispatcher.rewind(1, old, {"groups": b"[]"})
            assert bridge.dispatcher.counts.understood

    simulate(scenario())
