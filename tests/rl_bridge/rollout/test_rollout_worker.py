"""Episodes of one worker through real servers: endings, failures, and cut assignments."""

import asyncio
import itertools
import os
import signal
from typing import Any

import psutil
import pytest
from recorded_spans import lines, recorded, recorded_spans, request
from rollout_fixtures import EARNED, GONE, LENGTH, NotebookTask, word
from serving import eventually
from worker_fixtures import (
    HERE,
    absences,
    playing,
    trajectories,
    until_no_session_is_left,
)

from openenv_core import LocalProcessProvider
from rl_bridge.environments.leases import SessionDeadlines
from rl_bridge.errors import (
    GeneratorError,
    PromptRefusedError,
    ReplicaLostError,
    RolloutError,
)
from rl_bridge.rollout.assignment import Absence, AssignmentResult, NoTrajectory, sampling_seed
from rl_bridge.rollout.episode import REASON_CHARS
from rl_bridge.types import Ending

TIMEOUT_S = 60.0
"""A bound for tests that would hang otherwise; none is meant to come near it."""


async def test_sampling_settings_and_seeds_reach_the_engine(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        await play([5, 5], length=2, temperature=0.7)
        (settings,) = set(play.engine.settings)
        assert (settings.temperature, settings.max_new_tokens, settings.stop_token_ids) == (0.7, 4, (0,))
        assert play.engine.seeds == []
        # A run that is to repeat has a seed for every completion.
        await play([5, 5], length=2, sampling_key=(7, 3))
    expected = [sampling_seed(7, 3, sibling, turn) for sibling in range(2) for turn in range(2)]
    assert sorted(play.engine.seeds) == sorted(expected)
    assert len(set(expected)) == 4


async def test_limits_of_turns_and_length_truncate(notebook: str) -> None:
    # An answer may have four tokens, and begins as long as there is room for one: after a prompt of six, not of seven.
    async with playing([notebook], NotebookTask, word, max_length=7) as play:
        (turns,) = trajectories(await play([1], num_turns=2, length=3))
        (finished,) = trajectories(await play([1], num_turns=3, length=3))
        (length,) = trajectories(await play([1], length=9))
        (cut_by_environment,) = trajectories(await play([1], length=3, patience=2))
    assert (turns.ending, len(turns.turns), turns.reward) == (Ending.TRUNCATED_TURNS, 2, 0.5)
    # The last turn that is allowed may end the episode.
    assert (finished.ending, len(finished.turns), finished.reward) == (Ending.COMPLETED, 3, 0.75)
    assert (length.ending, len(length.turns), length.reward) == (Ending.TRUNCATED_LENGTH, 6, 1.5)
    assert [len(turn.prompt) for turn in length.turns] == [1, 2, 3, 4, 5, 6]
    assert {settings.max_new_tokens for settings in play.engine.settings} == {4}  # so all can share a call
    # The environment's own limit is told from its end.
    assert (cut_by_environment.ending, len(cut_by_environment.turns)) == (Ending.TRUNCATED_ENVIRONMENT, 2)
    assert cut_by_environment.ending.is_truncated()


@pytest.mark.slow
async def test_server_that_dies_is_never_scored_as_play(no_backoff: None) -> None:
    prompts = itertools.count(1)

    def in_the_midst(prompt: str) -> str:
        # Not by calls: how many prompts each has is a matter of how fast the machine is.
        if next(prompts) == 32:
            os.kill(psutil.Process(server.pid).children()[0].pid, signal.SIGKILL)
        return "word"

    deadlines = SessionDeadlines(connect_s=0.3)
    with LocalProcessProvider("rollout_fixtures:notebook_app", cwd=HERE) as server:
        async with playing([str(server.url)], NotebookTask, in_the_midst, deadlines=deadlines) as play:
            result = await play(range(24))
    finished = trajectories(result)
    assert 0 < len(finished) < 24
    assert absences(result).count(Absence.DROPPED) == 24 - len(finished)
    # A slow machine may need more for those that were played.
    assert result.retried >= 3 * (24 - len(finished))
    # What was lost has no reward; what has one was really played.
    assert {(one.ending, one.reward, len(one.turns)) for one in finished} == {(Ending.COMPLETED, 0.75, 3)}


@pytest.mark.parametrize("loss", [GeneratorError("out of memory"), ReplicaLostError("killed")])
async def test_policy_that_fails_costs_an_attempt_and_no_reward(notebook: str, loss: Exception) -> None:
    losses = [loss]

    def fail() -> None:
        if losses:
            raise losses.pop()

    async with playing([notebook], NotebookTask, word, sessions=2) as play:
        play.engine.before = fail
        result = await play([1, 2])
        assert [episode.reward for episode in trajectories(result)] == [0.75, 0.75]
        assert 1 <= result.retried <= 2  # whoever had asked in that call
        assert str(loss) in str(result.last_failure)
        losses += [loss] * 99
        (dropped,) = (await play([1])).outcomes
    assert isinstance(dropped, NoTrajectory)
    assert (dropped.absence, dropped.ending) == (Absence.DROPPED, Ending.FAILED_POLICY)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("explode", RolloutError, r"task raised\nTraceback .*\n.* in parse\n"),
        ("word", PromptRefusedError, "too long"),
    ],
)
async def test_faults_of_our_own_end_the_assignment(
    notebook: str, answer: str, error: type[Exception], message: str
) -> None:
    """Of the task's own code, and prompts that the engine refuses."""

    def refuse() -> None:
        if error is PromptRefusedError:
            raise PromptRefusedError(0, "too long")

    async with playing([notebook], NotebookTask, lambda prompt: answer) as play:
        play.engine.before = refuse
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(error, match=message):
                await play(range(32))
    await until_no_session_is_left(notebook)


async def test_action_that_the_server_refuses_ends_its_episode_alone(notebook: str) -> None:
    async with playing(
        [notebook], NotebookTask, lambda prompt: f"word{prompt.count('word')}", sessions=1
    ) as play:
        # A note is a text; this one is a number that its model refuses on the server.
        parse = play.task.parse
        play.task.parse = lambda text: {"text": 7} if text == "word1" else parse(text)  # type: ignore[method-assign]
        result = await play([1, 2])
        # The server said no before the environment heard of it: the session is as good as before.
        assert (play.sessions.opened, result.retried) == (1, 0)
        play.task.parse = parse  # type: ignore[method-assign]
        (finished,) = trajectories(await play([3]))
    for one in trajectories(result):
        assert (one.ending, len(one.turns), one.reward) == (Ending.REFUSED_ACTION, 2, 0.25 - 1.5)
        assert str(one.refusal).startswith("ValidationFailedError: VALIDATION_ERROR: ")
    assert len(trajectories(result)) == 2
    assert (finished.ending, finished.refusal) == (Ending.COMPLETED, None)
    await until_no_session_is_left(notebook)


async def test_cut_assignment_frees_its_sessions_for_others(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=3) as play:
        slow = asyncio.ensure_future(play([3] * 9, wait_s=TIMEOUT_S))
        await eventually(lambda: play.sessions.leased == 3)
        quick = asyncio.ensure_future(play([4]))
        await asyncio.sleep(0.01)
        play.worker.cancel([1, 99])
        async with asyncio.timeout(TIMEOUT_S / 2):
            cut, other = await slow, await quick
    assert (cut.lease, cut.preempted) == (1, False)
    assert absences(cut) == [Absence.UNFINISHED] * 9
    assert len(trajectories(other)) == 1
    await until_no_session_is_left(notebook)


async def test_worker_that_has_to_go_hands_back_what_it_has_and_takes_no_more(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=1) as play:
        leaving: list[asyncio.Future[None]] = []

        async def preempt() -> None:
            if len(play.engine.settings) == 4:  # one session: the first episode of three turns is over
                leaving.append(asyncio.ensure_future(play.worker.preempt()))
                await asyncio.get_running_loop().create_future()

        play.engine.before = preempt
        async with asyncio.timeout(TIMEOUT_S):
            result = await play([1, 2, 3])
            await asyncio.gather(*leaving)
        assert result.preempted
        assert absences(result) == [None, Absence.UNFINISHED, Absence.UNFINISHED]
        (finished,) = trajectories(result)
        assert (finished.seed, finished.reward) == (1, 0.75)
        # Whoever still asks waits for the end of the process, and does not come back in a circle.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await play([6])


async def test_cancelled_assignment_gives_its_sessions_back(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word) as play:
        waiting = asyncio.Event()
        play.engine.before = waiting.set
        task = asyncio.ensure_future(play(range(64), length=8))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until_no_session_is_left(notebook)


WHOLE = EARNED * LENGTH


def rewards(result: AssignmentResult) -> list[float | None]:
    return [None if isinstance(one, NoTrajectory) else one.reward for one in result.outcomes]


@pytest.mark.parametrize("at", [0, 2, LENGTH])
async def test_episode_that_fails_once_is_played_again_in_a_new_session(notebook: str, at: int) -> None:
    async with playing([notebook], NotebookTask, word, sessions=4) as play:
        result = await play(range(8), test=f"once-{at}", at=at, failing=[1, 5], times=1)
        assert (result.retried, play.sessions.discarded) == (2, 2)
        # Nobody is asked twice: else answers that seldom make an environment fail would be trained more often.
        assert len(play.engine.asked) == 8 * LENGTH
    await until_no_session_is_left(notebook)
    # Nothing of the attempt that failed is left: no turn, no reward.
    assert rewards(result) == [WHOLE] * 8
    assert [len(episode.turns) for episode in trajectories(result)] == [LENGTH] * 8


@pytest.mark.parametrize(
    "says",
    [
        GONE,
        {"metadata": {"infrastructure_error": GONE["reason"]}},
        {"metadata": {"execution": GONE}},  # as released environments say it
    ],
)
async def test_episode_that_keeps_failing_is_dropped_and_never_scored(
    notebook: str, says: dict[str, Any]
) -> None:
    async with playing([notebook], NotebookTask, word, max_attempts=3) as play:
        result = await play([1, 2, 3], test=str(says), says=says, failing=[2], times=1000)
    assert (result.retried, result.last_failure) == (3, "EpisodeLostError: the zygote is gone")
    assert rewards(result) == [WHOLE, None, WHOLE]
    dropped = result.outcomes[1]
    assert (absences(result)[1], dropped.ending) == (Absence.DROPPED, Ending.FAILED_ENVIRONMENT)


async def test_end_without_a_reward_is_left_out_and_counted_apart(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=4) as play:
        result = await play([1, 1, 2, 2], unjudged=[2], because="the judge took too long")
        silent = await play([2], unjudged=[2], because=True)
        # What an environment says goes into logs, and into every checkpoint: a part will do.
        endless = await play([2], unjudged=[2], because="x" * 100_000)
        # Many environments leave the reward of a step that earned nothing at None.
        earned = await play([2], unjudged=[2], because=None)
        # They were played, so they are not played again, and their sessions live on.
        assert (result.retried, play.sessions.discarded) == (0, 0)
    assert rewards(result) == [WHOLE] * 2 + [None] * 2
    reasons = ["the judge took too long", "nobody said why", "x" * REASON_CHARS + " …"]
    for outcome, reason in zip(
        (result.outcomes[3], *silent.outcomes, *endless.outcomes), reasons, strict=True
    ):
        assert outcome == NoTrajectory(absence=Absence.UNSCORED, reason=reason, ending=Ending.FAILED_REWARD)
    assert rewards(earned) == [EARNED * (LENGTH - 1)]


async def test_each_rollout_is_a_trace_of_answers_and_steps(notebook: str) -> None:
    with recorded_spans() as exporter:
        async with playing([notebook], NotebookTask, word) as play:
            await play([1, 2], length=3)

    to = "rollout > episode"
    turns = 3 * ["rollout > answer", *request("step", to)]
    assert lines(recorded(exporter)) == 2 * [["rollout", to, *request("reset", to), *turns]]
    spans = [span.attributes or {} for span in exporter.get_finished_spans() if span.name == "rollout"]
    assert {(one["ropewalk.seed"], one["ropewalk.sibling"]) for one in spans} == {(1, 0), (2, 1)}
