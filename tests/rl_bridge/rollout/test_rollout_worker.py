"""Episodes of one worker through real servers: how they end, what becomes of failures, how they are cut short."""

import asyncio
from collections.abc import Callable, Iterator
from random import Random

import pytest
from recorded_spans import lines, recorded, recorded_spans, request
from rollout_fixtures import EARNED, LENGTH, SAYINGS, NotebookTask, word
from worker_fixtures import (
    HERE,
    absences,
    kill_server,
    playing,
    trajectories,
    until,
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
        assert {(one.temperature, one.max_new_tokens, one.stop_token_ids) for one in play.engine.asked} == {
            (0.7, 4, (0,))
        }
        assert play.engine.seeds == []
        # A run that is to repeat has a seed for every completion.
        await play([5, 5], length=2, sampling_key=(7, 3))
    expected = [sampling_seed(7, 3, sibling, turn) for sibling in range(2) for turn in range(2)]
    assert sorted(play.engine.seeds) == sorted(expected)
    assert len(set(expected)) == 4


async def test_limits_of_turns_and_length_truncate(notebook: str) -> None:
    # Four new tokens at most, so a prompt of three words fits into seven, and one of four does not.
    async with playing([notebook], NotebookTask, word, max_length=7) as play:
        (turns,) = trajectories(await play([1], num_turns=2, length=3))
        (whole,) = trajectories(await play([1], num_turns=3, length=3))
        (length,) = trajectories(await play([1], length=9))
        (patience,) = trajectories(await play([1], length=3, patience=2))
    assert (turns.ending, len(turns.turns), turns.reward) == (Ending.TRUNCATED_TURNS, 2, 0.5)
    # The last turn that is allowed may end the episode.
    assert (whole.ending, len(whole.turns), whole.reward) == (Ending.COMPLETED, 3, 0.75)
    assert (length.ending, len(length.turns), length.reward) == (Ending.TRUNCATED_LENGTH, 3, 0.75)
    assert [len(turn.prompt) for turn in length.turns] == [1, 2, 3]
    # The environment's own limit is told from its end.
    assert (patience.ending, len(patience.turns)) == (Ending.TRUNCATED_ENVIRONMENT, 2)
    assert patience.ending.is_truncated()


@pytest.fixture
def process(no_backoff: None) -> Iterator[str]:
    with LocalProcessProvider("rollout_fixtures:notebook_app", cwd=HERE) as provider:
        yield str(provider.url)


@pytest.mark.slow
async def test_failures_at_random_do_not_select_among_the_answers(notebook: str) -> None:
    policy, answers = Random(7), list[str]()
    episodes, illegal = 400, 0.3

    def answer(prompt: str) -> str:
        answers.append("nonsense" if policy.random() < illegal else "word")
        return answers[-1]

    async with playing([notebook], NotebookTask, answer, max_attempts=15, sessions=50) as play:
        result = await play(range(episodes), flaky=0.2)
    played = trajectories(result)
    assert result.retried > 50
    assert len(played) == episodes
    # Every answer that was drawn is in a trajectory, and each once: so they are as the policy gives them.
    assert len(answers) == sum(len(one.turns) for one in played)
    # An environment that is sound ends an episode so where one of three answers means nothing.
    share = sum(one.ending is Ending.ILLEGAL for one in played) / episodes
    expected = 1 - (1 - illegal) ** LENGTH
    assert abs(share - expected) < 4 * (expected * (1 - expected) / episodes) ** 0.5


@pytest.mark.slow
async def test_server_that_dies_is_never_scored_as_play(process: str) -> None:
    prompts = 0

    def in_the_midst(prompt: str) -> str:
        # Not by calls: how many prompts each has is a matter of how fast the machine is.
        nonlocal prompts
        prompts += 1
        if prompts == 32:
            kill_server(process)
        return "word"

    deadlines = SessionDeadlines(connect_s=0.3)
    async with playing([process], NotebookTask, in_the_midst, deadlines=deadlines) as play:
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
    async with playing([notebook], NotebookTask, word, sessions=2) as play:
        left = [loss]

        def fail() -> None:
            if left:
                raise left.pop()

        play.engine.before = fail
        result = await play([1, 2])
        assert [episode.reward for episode in trajectories(result)] == [0.75, 0.75]
        assert 1 <= result.retried <= 2  # whoever had asked in that call
        assert str(loss) in str(result.last_failure)
        play.engine.before = raising(loss)
        (dropped,) = (await play([1])).outcomes
    assert isinstance(dropped, NoTrajectory)
    assert (dropped.absence, dropped.ending) == (Absence.DROPPED, Ending.FAILED_POLICY)


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [None, PromptRefusedError(0, "too long")])
async def test_faults_of_our_own_end_the_assignment(notebook: str, error: Exception | None) -> None:
    """Of the task's own code, of what stands in for the engine, and prompts that it refuses."""
    async with playing(
        [notebook], NotebookTask, lambda prompt: "explode" if error is None else "word"
    ) as play:
        if error is not None:
            play.engine.before = raising(error)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(
                type(error or RolloutError()), match=str(error or r"task raised\nTraceback .*\n.* in parse\n")
            ):
                await play(range(32))
    await until_no_session_is_left(notebook)


async def test_action_that_the_server_refuses_ends_its_episode_alone(notebook: str) -> None:
    async with playing(
        [notebook], NotebookTask, lambda prompt: f"word{prompt.count('word')}", sessions=1
    ) as play:
        # A note is a text; this one is a number that its model refuses on the server.
        taken = play.task.parse
        play.task.parse = lambda text: {"text": 7} if text == "word1" else taken(text)  # type: ignore[method-assign]
        result = await play([1, 2])
        # The server said no before the environment heard of it: the session is as good as before.
        assert (play.sessions.opened, result.retried) == (1, 0)
        play.task.parse = taken  # type: ignore[method-assign]
        (whole,) = trajectories(await play([3]))
    for one in trajectories(result):
        assert (one.ending, len(one.turns), one.reward) == (Ending.REFUSED_ACTION, 2, 0.25 - 1.5)
        assert str(one.refusal).startswith("ValidationFailedError: VALIDATION_ERROR: ")
    assert len(trajectories(result)) == 2
    assert (whole.ending, whole.refusal) == (Ending.COMPLETED, None)
    await until_no_session_is_left(notebook)


async def test_cut_assignment_frees_its_sessions_for_others(notebook: str) -> None:
    async with playing([notebook], NotebookTask, word, sessions=3) as play:
        slow = asyncio.ensure_future(play([3] * 9, wait_s=TIMEOUT_S))
        await until(lambda: play.sessions.leased == 3)
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
            if len(play.engine.asked) == 4:  # one session: the first episode of three turns is over
                leaving.append(asyncio.ensure_future(play.worker.preempt()))
                await asyncio.get_running_loop().create_future()

        play.engine.before = preempt
        async with asyncio.timeout(TIMEOUT_S):
            result = await play([1, 2, 3])
            await asyncio.gather(*leaving)
        assert result.preempted
        assert absences(result) == [None, Absence.UNFINISHED, Absence.UNFINISHED]
        (kept,) = trajectories(result)
        assert (kept.seed, kept.reward) == (1, 0.75)
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


@pytest.mark.parametrize(
    ("saying", "at"),
    [("status", 0), ("status", LENGTH), ("metadata", 2)],
)
async def test_episode_that_fails_once_is_played_again_in_a_new_session(
    notebook: str, saying: str, at: int, request: pytest.FixtureRequest
) -> None:
    async with playing([notebook], NotebookTask, word, sessions=4) as play:
        result = await play(range(8), test=request.node.name, saying=saying, at=at, failing=[1, 5], times=1)
        assert result.retried == 2
        assert play.sessions.discarded == 2
    await until_no_session_is_left(notebook)
    # Nothing of the attempt that failed is left: no turn, no reward.
    assert rewards(result) == [WHOLE] * 8
    assert [len(episode.turns) for episode in trajectories(result)] == [LENGTH] * 8


@pytest.mark.parametrize("saying", SAYINGS)
async def test_episode_that_keeps_failing_is_dropped_and_never_scored(notebook: str, saying: str) -> None:
    async with playing([notebook], NotebookTask, word, max_attempts=3) as play:
        result = await play([1, 2, 3], test=f"dropped-{saying}", saying=saying, failing=[2], times=1000)
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
    told = [dict(span.attributes or {}) for span in exporter.get_finished_spans() if span.name == "rollout"]
    assert sorted((one["ropewalk.seed"], one["ropewalk.sibling"]) for one in told) == [(1, 0), (2, 1)]
