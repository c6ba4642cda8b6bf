"""The dispatcher over workers that are simulated: groups that are not trained, and when nothing can be."""

from collections.abc import Callable

import pytest
from dispatcher_stage import (
    EPISODE,
    LOST,
    SIBLINGS,
    Bridge,
    Workers,
    altered,
    answer,
    at_once,
    in_order,
    simulated,
)

from rl_bridge.errors import ReplicaLostError, RolloutError
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory
from rl_bridge.rollout.groups import ALL_TRUNCATED, NO_VARIANCE, GroupFilter, Overlong
from rl_bridge.types import Ending


async def agreeing(workers: Workers, assignment: Assignment) -> AssignmentResult:
    """Siblings with equal rewards, in every group."""
    return await altered(workers, assignment, reward=0.0)


async def agreeing_unless_third(workers: Workers, assignment: Assignment) -> AssignmentResult:
    """Siblings with equal rewards, but for every third group."""
    play = agreeing if assignment.group is not None and assignment.group % 3 < 2 else at_once
    return await play(workers, assignment)


@simulated
async def test_groups_without_variance_are_replaced_and_counted() -> None:
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


@simulated
async def test_groups_without_variance_are_trained_once_refills_are_used_up() -> None:
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
        resumed = Bridge(agreeing, groups=groups, group_filter=GroupFilter(dynamic=True, refills=2 * groups))
        resumed.workers.version = 3
        await resumed.dispatcher.rewind(3, state, attachments())
        async with resumed.dispatcher:
            assert [group.id for group in await resumed.sample(3)] == expected
            assert resumed.dispatcher.take_tally().refused == {NO_VARIANCE: 2 * groups}


@simulated
async def test_step_cannot_use_the_refills_of_earlier_steps() -> None:
    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        # All agree once the first weights have been trained.
        return await (at_once if workers.version == 0 else agreeing)(workers, assignment)

    bridge = Bridge(how, group_filter=GroupFilter(dynamic=True, refills=4))
    async with bridge.dispatcher:
        assert [group.id for group in await bridge.sample(0)] == [0, 1]
        bridge.serve(1)
        assert [group.id for group in await bridge.sample(1)] == [6, 7]
        assert bridge.dispatcher.take_tally().refused == {NO_VARIANCE: 4}


@simulated
async def test_group_played_again_has_the_refills_of_its_step() -> None:
    """In whichever order groups come back, and whoever is lost meanwhile, the same ones are refused."""
    lost = {1, 5}

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        if assignment.group in lost:
            lost.discard(assignment.group)
            raise ReplicaLostError("killed")
        return await agreeing(workers, assignment)

    bridge = Bridge(how, group_filter=GroupFilter(dynamic=True, refills=4))
    async with bridge.dispatcher:
        assert sorted(group.id for group in await bridge.sample(0)) == [4, 5]
        assert not lost


@simulated
async def test_groups_that_are_all_masked_end_the_run() -> None:
    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        return await altered(workers, assignment, ending=Ending.TRUNCATED_LENGTH)

    bridge = Bridge(how, group_filter=GroupFilter(overlong=Overlong(handling="mask")))
    async with bridge.dispatcher:
        with pytest.raises(RolloutError, match=r"none of the last 8 groups.*had all siblings truncated$"):
            await bridge.sample()
    assert bridge.buffer.ledger.dropped == {ALL_TRUNCATED: 8}
    assert bridge.dispatcher.take_tally().endings == {Ending.TRUNCATED_LENGTH: 8 * SIBLINGS}


@simulated
async def test_failures_are_tallied_by_their_ending() -> None:
    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        first, second, third, _ = (await at_once(workers, assignment)).outcomes
        failed = NoTrajectory(absence=Absence.UNSCORED, reason="", ending=Ending.FAILED_REWARD)
        return AssignmentResult(lease=assignment.lease, outcomes=(first, second, third, failed))

    bridge = Bridge(how)
    async with bridge.dispatcher:
        await bridge.sample()
        assert bridge.dispatcher.take_tally().endings == {Ending.FAILED_REWARD: 2}


@simulated
async def test_groups_without_enough_siblings_are_dropped_and_replaced() -> None:
    def mostly_lost(assignment: Assignment) -> AssignmentResult:
        unscored = NoTrajectory(absence=Absence.UNSCORED, reason="the judge slept")
        done, *_ = answer(assignment).outcomes
        return AssignmentResult(
            lease=assignment.lease, outcomes=(done, LOST, LOST, unscored), retried=6, last_failure=LOST.reason
        )

    bridge = Bridge(in_order(None, mostly_lost))
    async with bridge.dispatcher:
        groups = await bridge.sample()
    assert [group.id for group in groups] == [0, 2]
    assert bridge.buffer.ledger.dropped == {"too few siblings: 2 dropped, 1 played, 1 unscored": 1}
    counts = bridge.dispatcher.counts
    assert (counts.retried, counts.dropped, counts.unscored) == (6, 2, 1)
    assert (counts.last_failure, counts.last_unscored) == (LOST.reason, "the judge slept")


@simulated
async def test_run_of_unusable_groups_ends_and_says_why() -> None:
    def lost(assignment: Assignment) -> AssignmentResult:
        unscored = NoTrajectory(absence=Absence.UNSCORED, reason="the judge is gone")
        return AssignmentResult(lease=assignment.lease, outcomes=(unscored,) * SIBLINGS)

    # Once is no reason to end: a success in between counts.
    bridge = Bridge(in_order(lost, *[None] * 4, *[lost] * 8), slots=1)
    async with bridge.dispatcher:
        for version in range(2):
            await bridge.sample(version)
            bridge.serve(version + 1)
        with pytest.raises(RolloutError, match=r"none of the last 8 .* 4 unscored; .*the judge is gone"):
            await bridge.sample(2)
    assert len(bridge.workers.assignments) == 13


FAILED = NoTrajectory(
    absence=Absence.DROPPED, reason="ExecutionError: the environment raised", ending=Ending.FAILED_ENVIRONMENT
)


@simulated
@pytest.mark.parametrize(("lost", "ends"), [(2, False), (3, True)])
async def test_run_that_loses_most_episodes_ends_though_the_others_could_be_trained(
    lost: int, ends: bool
) -> None:
    def how(failed: int) -> Callable[[Assignment], AssignmentResult]:
        def play(assignment: Assignment) -> AssignmentResult:
            outcomes = answer(assignment).outcomes[failed:] + (FAILED,) * failed
            return AssignmentResult(
                lease=assignment.lease, outcomes=outcomes, retried=3 * failed, last_failure=FAILED.reason
            )

        return play

    bridge = Bridge(in_order(None, *[how(lost)] * 40), slots=1, min_group_size=1)

    async def steps() -> None:
        for version in range(10):
            await bridge.sample(version)
            bridge.serve(version + 1)

    async with bridge.dispatcher:
        if not ends:
            await steps()
            return
        with pytest.raises(
            RolloutError, match=r"at most 50% .*max_lost_share.*got 66% of the last 8 .*raised"
        ):
            await steps()


@simulated
async def test_environment_that_takes_no_step_ends_the_run_whatever_else_is_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        played = (await altered(workers, assignment, ending=Ending.ILLEGAL)).outcomes
        return AssignmentResult(
            lease=assignment.lease, outcomes=(*played[1:], FAILED), retried=3, last_failure=FAILED.reason
        )

    async def traceback() -> str:
        nonlocal asked
        asked += 1
        return "Traceback (most recent call last):\nKeyError: 'price'"

    bridge = Bridge(how, groups=8, slots=8, explain=traceback)
    async with bridge.dispatcher:
        await bridge.sample(0)
        with pytest.raises(RolloutError, match=r"not taken a single step: 8 of 32 episodes failed .* raised"):
            await bridge.sample(1)
    (line,) = caplog.messages
    assert "the environment raised\nTraceback (most recent call last):\nKeyError: 'price'" in line
    assert asked == 1


@simulated
async def test_error_that_is_no_loss_reaches_the_loop() -> None:
    bridge = Bridge(in_order(ZeroDivisionError("the task is wrong")))
    async with bridge.dispatcher:
        with pytest.raises(ZeroDivisionError, match="the task is wrong"):
            await bridge.sample()


@simulated
async def test_worker_that_dies_with_many_groups_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bridge = Bridge(in_order(*[ReplicaLostError("replica 0 of rollout is lost")] * 20), groups=20, slots=20)
    async with bridge.dispatcher:
        await bridge.buffer.sample(0, 20)
    (line,) = caplog.messages
    assert "20 group(s) (0, 1, 2, 3, 4, 5, 6, 7, …): replica 0 of rollout is lost" in line


@simulated
async def test_task_whose_actions_are_all_refused_ends_the_run_within_a_step() -> None:
    refusing = True

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        if not refusing:
            return await at_once(workers, assignment)
        return await altered(workers, assignment, ending=Ending.REFUSED_ACTION, refusal="no such field")

    async with Bridge(how).dispatcher as dispatcher:
        with pytest.raises(RolloutError, match=r"none of 4 episodes"):
            await dispatcher.play_held_out(range(4), EPISODE, timeout_s=9.0)
        assert await dispatcher.play_held_out((), EPISODE, timeout_s=9.0) == []
    bridge = Bridge(how)

    async def steps() -> None:
        for version in range(3):
            await bridge.sample(version)
            bridge.serve(version + 1)

    async with bridge.dispatcher:
        with pytest.raises(RolloutError, match=r"none of 8 episodes .*The last refusal: no such field"):
            await steps()
    # Once one was taken, refusals are the policy's doing; so they are in checkpoints from before they were counted.
    refusing = False
    bridge = Bridge(how)
    async with bridge.dispatcher:
        await bridge.sample(0)
        refusing = True
        bridge.serve(1)
        old = bridge.dispatcher.state()[0]
        await bridge.sample(1)
        assert len(await bridge.dispatcher.play_held_out(range(4), EPISODE, timeout_s=9.0)) == 4
        for name in ("understood", "refused", "last_refusal"):
            del old["episodes"][name]
        await bridge.dispatcher.rewind(1, old, {"groups": b"[]"})
        assert bridge.dispatcher.counts.understood
