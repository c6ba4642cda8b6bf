"""Episodes of one worker through real servers: how they end, what becomes of failures, and how they are cut short."""

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from rollout_fixtures import NotebookTask, Script, TableTask, stand_on_17
from worker_fixtures import (
    HERE,
    absences,
    active_sessions,
    kill_server,
    playing,
    trajectories,
    until_no_session_is_left,
)

from openenv_core import LocalProcessProvider
from openenv_core.errors import FactoryFailed, ServerError, SessionFailed
from rl_bridge.environments.deadlines import SessionDeadlines
from rl_bridge.errors import GeneratorError, NoReplica, PromptRefused, ReplicaLost, RolloutError
from rl_bridge.rollout import attempts
from rl_bridge.rollout.assignment import Absence, NoTrajectory
from rl_bridge.rollout.seeds import sampling_seed
from rl_bridge.types import Ending, Trajectory

TIMEOUT_S = 60.0
"""A bound for tests that would hang otherwise; none is meant to come near it."""


@pytest.fixture(scope="module")
def blackjack() -> Iterator[str]:
    with LocalProcessProvider("rollout_fixtures:blackjack_app", cwd=HERE) as provider:
        yield str(provider.url)


@pytest.fixture(scope="module")
def notebook() -> Iterator[str]:
    with LocalProcessProvider("rollout_fixtures:notebook_app", cwd=HERE) as provider:
        yield str(provider.url)


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)


def word(prompt: str) -> str:
    return "word"


async def test_hands_are_played_to_their_end(blackjack: str) -> None:
    async with playing([blackjack], TableTask, stand_on_17) as play:
        result = await play(range(100))
        # As many sessions as allowed, kept from hand to hand.
        assert play.sessions.counts.opened == 8
        assert await asyncio.to_thread(active_sessions, blackjack) == 8
        assert (result.lease, result.retried, result.last_failure, result.preempted) == (1, 0, None, False)
    await until_no_session_is_left(blackjack)
    hands = trajectories(result)
    assert [hand.seed for hand in hands] == list(range(100))
    assert {hand.ending for hand in hands} == {Ending.COMPLETED}
    assert {hand.reward for hand in hands} == {-1.0, 0.0, 1.0}
    assert {hand.version for hand in hands} == {3}
    for hand in hands:
        # The script hit until it had 17, and stood then, or went bust.
        assert [len(turn.prompt) for turn in hand.turns] == [3] * len(hand.turns)
        assert all(turn.completion.logprobs == [-0.5] for turn in hand.turns)


async def test_assignments_at_the_same_time_share_the_sessions(blackjack: str) -> None:
    async with playing([blackjack], TableTask, stand_on_17, sessions=4) as play:
        results = await asyncio.gather(*(play([seed] * 8) for seed in range(6)))
        assert play.sessions.counts.opened == 4
    for seed, result in enumerate(results):
        hands = trajectories(result)
        assert [hand.seed for hand in hands] == [seed] * 8
        # One policy, one deal: the same hand to the last card.
        assert all(hand == hands[0] for hand in hands)
    assert len({result.lease for result in results}) == 6


async def test_the_temperature_reaches_the_engine(blackjack: str) -> None:
    async with playing([blackjack], TableTask, stand_on_17) as play:
        await play([1, 2], temperature=0.7)
        await play([1, 2], temperature=0.0)
        assert {
            (asked.temperature, asked.max_new_tokens, asked.stop_token_ids) for asked in play.engine.asked
        } == {(0.7, 4, (0,)), (0.0, 4, (0,))}


async def test_every_completion_has_a_seed_of_its_own_where_a_run_is_to_repeat(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        await play([5, 5], length=2)
        assert play.engine.seeds == []
        await play([5, 5], length=2, sampling_key=(7, 3))
        assert sorted(play.engine.seeds) == sorted(
            sampling_seed(7, 3, sibling, turn) for sibling in range(2) for turn in range(2)
        )
        assert len(set(play.engine.seeds)) == 4


async def test_an_answer_that_is_no_action_ends_the_hand_and_is_penalised(blackjack: str) -> None:
    async with playing([blackjack], TableTask, lambda prompt: "fold") as play:
        result = await play([1, 2, 3])
    hands = trajectories(result)
    assert [(hand.ending, hand.reward, len(hand.turns)) for hand in hands] == [(Ending.ILLEGAL, -1.5, 1)] * 3
    assert result.retried == 0


async def test_the_penalty_comes_on_top_of_what_was_earned(notebook: str) -> None:
    async with playing(
        [notebook], NotebookTask, lambda prompt: "nonsense" if len(prompt.split()) == 3 else "word"
    ) as play:
        (episode,) = trajectories(await play([1], length=9))
    assert (episode.ending, len(episode.turns)) == (Ending.ILLEGAL, 3)
    assert episode.reward == 0.25 + 0.25 - 1.5


async def test_a_limit_of_turns_truncates(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        (episode,) = trajectories(await play([1], num_turns=2, length=3))
        (whole,) = trajectories(await play([1], num_turns=3, length=3))
    assert (episode.ending, len(episode.turns), episode.reward) == (Ending.TRUNCATED_TURNS, 2, 0.5)
    assert episode.ending.is_truncated()
    # The last turn that is allowed may end the episode.
    assert (whole.ending, len(whole.turns), whole.reward) == (Ending.COMPLETED, 3, 0.75)
    assert not whole.ending.is_truncated()


async def test_a_prompt_that_leaves_no_room_truncates(notebook: str) -> None:
    # Four new tokens at most, so a prompt of three words fits into seven, and one of four does not.
    async with playing([notebook], NotebookTask, word, max_length=7) as play:
        (episode,) = trajectories(await play([1], length=9))
    assert (episode.ending, len(episode.turns), episode.reward) == (Ending.TRUNCATED_LENGTH, 3, 0.75)
    assert [len(turn.prompt) for turn in episode.turns] == [1, 2, 3]


async def test_an_episode_that_is_over_before_it_begins_is_no_trajectory(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        result = await play([1, 2], over_at_once=True)
    assert absences(result) == [Absence.NO_TURN] * 2


async def test_an_environment_that_fails_once_is_asked_again(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        await asyncio.to_thread(urlopen, Request(f"{notebook}/fail/3", method="POST"), timeout=10)
        result = await play(range(16))
        assert result.retried == 3
        assert "out of order" in str(result.last_failure)
        # Each failure cost its session, and another was made.
        assert play.sessions.counts.opened == 8 + 3
    await until_no_session_is_left(notebook)
    assert [(e.ending, e.reward, len(e.turns)) for e in trajectories(result)] == [
        (Ending.COMPLETED, 0.75, 3)
    ] * 16


async def test_an_environment_that_keeps_failing_is_dropped_and_counted(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        result = await play([1, 1, 2, 2, 3, 3], broken_seeds=[2])
    await until_no_session_is_left(notebook)
    assert result.retried == 6
    assert absences(result) == [None, None, Absence.DROPPED, Absence.DROPPED, None, None]
    dropped = result.outcomes[2]
    assert isinstance(dropped, NoTrajectory)
    assert "seed 2 is broken" in dropped.reason


@pytest.mark.slow
async def test_a_server_that_dies_is_never_scored_as_play() -> None:
    with LocalProcessProvider("rollout_fixtures:blackjack_app", cwd=HERE) as provider:
        url = str(provider.url)
        deadlines = SessionDeadlines(connect_s=0.3)
        prompts = 0

        def in_the_midst(prompt: str) -> str:
            # Not by calls: how many prompts each has is a matter of how fast the machine is.
            nonlocal prompts
            prompts += 1
            if prompts == 20:
                kill_server(url)
            return stand_on_17(prompt)

        async with playing([url], TableTask, in_the_midst, deadlines=deadlines) as play:
            result = await play(range(24))
    finished = trajectories(result)
    assert 0 < len(finished) < 24
    assert absences(result).count(Absence.DROPPED) == 24 - len(finished)
    assert result.retried >= 3 * (
        24 - len(finished)
    )  # a slow machine may need more for those that were played
    # What was lost has no reward; what has one was really played.
    assert all(hand.ending is Ending.COMPLETED and hand.turns for hand in finished)


async def test_episodes_of_a_dead_server_are_played_on_its_successor(blackjack: str) -> None:
    with LocalProcessProvider("rollout_fixtures:blackjack_app", cwd=HERE) as first:
        async with playing([str(first.url)], TableTask, stand_on_17) as play:
            calls = 0

            async def in_the_midst() -> None:
                nonlocal calls
                calls += 1
                if calls == 10:
                    kill_server(str(first.url))
                    await asyncio.sleep(0.3)  # as long as it takes until somebody tells of another
                    play.sessions.replace([blackjack])

            undisturbed = await play(range(64))
            play.engine.before = in_the_midst
            result = await play(range(64))
        await until_no_session_is_left(blackjack)
        # Begun anew from their seeds, they are the hands that they would have been.
        assert result.outcomes == undisturbed.outcomes
        assert 0 < result.retried <= 8  # each session found out once


@pytest.mark.parametrize(
    "loss",
    [GeneratorError("out of memory"), ReplicaLost("killed"), NoReplica("none")],
    ids=["engine", "lost", "none"],
)
async def test_a_policy_that_fails_costs_an_attempt_and_no_reward(notebook: str, loss: Exception) -> None:
    async with playing([notebook], NotebookTask, word, sessions=2) as play:
        calls = 0

        def fail() -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise loss

        play.engine.before = fail
        result = await play([1, 2])
        assert [episode.reward for episode in trajectories(result)] == [0.75, 0.75]
        assert 1 <= result.retried <= 2  # whoever had asked in that call
        assert str(loss) in str(result.last_failure)


async def test_a_policy_that_never_answers_is_told_from_an_environment_that_fails(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=2) as play:

        def fail() -> None:
            raise GeneratorError("out of memory")

        play.engine.before = fail
        (dropped,) = (await play([1])).outcomes
    assert isinstance(dropped, NoTrajectory)
    assert (dropped.absence, dropped.ending) == (Absence.DROPPED, Ending.FAILED_POLICY)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        # A fault in the task's own code, and one in the script that stands in for the engine.
        (lambda prompt: "explode", ZeroDivisionError),
        (lambda prompt: str(1 // 0), ZeroDivisionError),
    ],
    ids=["task", "engine"],
)
async def test_our_own_faults_end_the_assignment(
    notebook: str, script: Script, error: type[Exception]
) -> None:
    async with playing([notebook], NotebookTask, script) as play:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(error):
                await play(range(32))
    await until_no_session_is_left(notebook)


async def test_a_prompt_that_the_engine_refuses_is_our_own_fault(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:

        def refuse() -> None:
            raise PromptRefused(0, "too long")

        play.engine.before = refuse
        with pytest.raises(PromptRefused, match="too long"):
            await play([1])


async def test_an_action_that_the_server_refuses_ends_its_episode_alone(notebook: str) -> None:
    async with playing(
        [notebook], NotebookTask, lambda prompt: f"word{prompt.count('word')}", sessions=1
    ) as play:
        # A note is a text; this one is a number that its model refuses on the server.
        taken = play.task.parse
        play.task.parse = lambda text: {"text": 7} if text == "word1" else taken(text)  # type: ignore[method-assign]
        result = await play([1, 2])
        # The server said no before the environment heard of it: the session is as good as before.
        assert (play.sessions.counts.opened, result.retried) == (1, 0)
        play.task.parse = taken  # type: ignore[method-assign]
        (whole,) = trajectories(await play([3]))
    for one in trajectories(result):
        assert (one.ending, len(one.turns), one.reward) == (Ending.REFUSED_ACTION, 2, 0.25 - 1.5)
        assert str(one.refusal).startswith("ValidationFailed: VALIDATION_ERROR: ")
    assert len(trajectories(result)) == 2
    assert (whole.ending, whole.refusal) == (Ending.COMPLETED, None)
    await until_no_session_is_left(notebook)


async def test_a_reset_that_the_server_refuses_is_not_repeated(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        with pytest.raises(RolloutError, match=r"refuses what it is sent: .*VALIDATION_ERROR"):
            await play([1, 2], episode_id=7)
    await until_no_session_is_left(notebook)


@pytest.mark.parametrize("kind", [SessionFailed, FactoryFailed])
async def test_a_session_that_could_not_be_kept_is_lost_and_no_end_of_all(
    notebook: str, kind: type[ServerError]
) -> None:
    """A server ends the session of a step that takes too long, and what takes long the policy decides."""
    async with playing([notebook], NotebookTask, word) as play:
        left = [kind("expected the environment to answer within 300 s", "SESSION_ERROR")] * 2
        taken = play.task.client_type.step

        async def step(client: Any, action: Any) -> Any:
            if left:
                raise left.pop()
            return await taken(client, action)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(play.task.client_type, "step", step)
            result = await play([1])
        assert ([one.ending for one in trajectories(result)], result.retried) == ([Ending.COMPLETED], 2)


async def test_a_cut_brings_what_is_finished_and_frees_the_sessions(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=3) as play:
        first = await play([1, 2])
        slow = asyncio.ensure_future(play([3] * 9, wait_s=30.0))
        quick = asyncio.ensure_future(play([4]))
        await asyncio.sleep(0.3)
        play.worker.cut([slow_lease := 2, 99])
        async with asyncio.timeout(10.0):
            cut, other = await slow, await quick
        assert cut.lease == slow_lease
        assert absences(cut) == [Absence.UNFINISHED] * 9
        assert not cut.preempted
        # Another's assignment was waiting for a session all the time.
        assert len(trajectories(first)) == 2
        assert len(trajectories(other)) == 1
    await until_no_session_is_left(notebook)


async def test_a_worker_that_has_to_go_hands_back_what_it_has_and_takes_no_more(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=4) as play:
        quick = asyncio.ensure_future(play([1]))
        stuck = asyncio.ensure_future(play([3, 4, 5], wait_s=TIMEOUT_S))
        await quick
        await asyncio.sleep(0.2)
        async with asyncio.timeout(10.0):
            await play.worker.leave()
            await asyncio.sleep(0)
            assert stuck.done()  # it has been answered, and the process may end
            left = await stuck
        assert left.preempted
        assert absences(left) == [Absence.UNFINISHED] * 3
        # Whoever still asks waits for the end of the process, and does not come back in a circle.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await play([6])


async def test_what_was_finished_before_a_worker_went_is_not_called_unfinished(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=1) as play:
        leaving: list[asyncio.Future[None]] = []

        async def go() -> None:
            if len(play.engine.asked) == 4:  # one session: the first episode of three turns is over
                leaving.append(asyncio.ensure_future(play.worker.leave()))
                await asyncio.sleep(0.1)

        play.engine.before = go
        result = await play([1, 2, 3])
        await asyncio.gather(*leaving)
    assert result.preempted
    assert absences(result) == [None, Absence.UNFINISHED, Absence.UNFINISHED]
    (kept,) = trajectories(result)
    assert (kept.seed, kept.reward) == (1, 0.75)


async def test_a_cancelled_assignment_gives_its_sessions_back(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        waiting = asyncio.Event()
        play.engine.before = waiting.set
        task = asyncio.ensure_future(play(range(64), length=8))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until_no_session_is_left(notebook)


@pytest.mark.soak
async def test_256_episodes_at_once_against_one_server_do_not_fail(blackjack: str) -> None:
    in_flight: list[int] = []
    async with playing([blackjack], TableTask, stand_on_17, sessions=256) as play:
        play.engine.before = lambda: in_flight.append(play.sessions.counts.lent)
        result = await play([seed for seed in range(128) for _ in range(4)])
        assert play.sessions.counts.failed == 0
    assert max(in_flight) == 256
    assert len([one for one in result.outcomes if isinstance(one, Trajectory)]) == 512
    assert result.retried == 0
