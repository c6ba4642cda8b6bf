"""The policy's error and the infrastructure's, through a real server: played again, dropped, left out, never scored."""

from collections.abc import Iterator

import pytest
from troubled_fixtures import EARNED, LENGTH, SAYINGS, TroubledTask
from worker_fixtures import HERE, absences, playing, trajectories, until_no_session_is_left

from openenv_core import LocalProcessProvider
from rl_bridge.rollout import attempts
from rl_bridge.rollout.assignment import Absence, AssignmentResult, NoTrajectory
from rl_bridge.rollout.groups import training_samples
from rl_bridge.rollout.outcomes import REASON_CHARS
from rl_bridge.types import Ending, Group

WHOLE = EARNED * LENGTH


@pytest.fixture(scope="module")
def troubled() -> Iterator[str]:
    with LocalProcessProvider("troubled_fixtures:troubled_app", cwd=HERE) as provider:
        yield str(provider.url)


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)


def word(prompt: str) -> str:
    return "word"


def rewards(result: AssignmentResult) -> list[float | None]:
    return [None if isinstance(one, NoTrajectory) else one.reward for one in result.outcomes]


@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.parametrize("at", [0, 2, LENGTH], ids=["reset", "midst", "end"])
async def test_what_fails_once_is_played_again_in_a_new_session(
    troubled: str, saying: str, at: int, request: pytest.FixtureRequest
) -> None:
    async with playing([troubled], TroubledTask, word, sessions=4) as play:
        result = await play(range(8), test=request.node.name, saying=saying, at=at, failing=[1, 5], times=1)
        assert result.retried == 2
        assert play.sessions.counts.discarded == 2
    await until_no_session_is_left(troubled)
    # Nothing of the attempt that failed is left: no turn, no reward.
    assert rewards(result) == [WHOLE] * 8
    assert [len(episode.turns) for episode in trajectories(result)] == [LENGTH] * 8


@pytest.mark.parametrize("saying", SAYINGS)
async def test_what_keeps_failing_is_dropped_and_counted_and_never_scored(troubled: str, saying: str) -> None:
    async with playing([troubled], TroubledTask, word, max_attempts=3) as play:
        result = await play(
            [1, 1, 2, 2, 3, 3], test=f"dropped-{saying}", saying=saying, failing=[2], times=1000
        )
    assert result.retried == 6
    assert result.last_failure == "EpisodeLost: the zygote is gone"
    assert rewards(result) == [WHOLE, WHOLE, None, None, WHOLE, WHOLE]
    assert absences(result)[2:4] == [Absence.DROPPED] * 2
    assert {one.ending for one in result.outcomes[2:4]} == {Ending.FAILED_ENVIRONMENT}


@pytest.mark.parametrize("because", ["the judge took too long", True])
async def test_an_end_without_a_reward_is_left_out_and_counted_apart(
    troubled: str, because: str | bool
) -> None:
    async with playing([troubled], TroubledTask, word, sessions=4) as play:
        result = await play([1, 1, 1, 2, 2, 2], unjudged=[2], because=because)
        # It was played, so it is not played again, and its session lives on.
        assert (result.retried, play.sessions.counts.discarded) == (0, 0)
    assert rewards(result) == [WHOLE] * 3 + [None] * 3
    reason = because if isinstance(because, str) else "nobody said why"
    unscored = NoTrajectory(absence=Absence.UNSCORED, reason=reason, ending=Ending.FAILED_REWARD)
    assert result.outcomes[3:] == (unscored,) * 3


async def test_what_an_environment_says_of_a_failure_is_told_in_part(troubled: str) -> None:
    """It goes into logs, and into every checkpoint."""
    async with playing([troubled], TroubledTask, word) as play:
        (unscored,) = (await play([1], unjudged=[1], because="x" * 100_000)).outcomes
    assert isinstance(unscored, NoTrajectory)
    assert unscored.reason == "x" * REASON_CHARS + " …"


async def test_an_end_without_reward_and_without_reason_is_what_was_earned(troubled: str) -> None:
    """Many environments leave the reward of a step that earned nothing at None."""
    async with playing([troubled], TroubledTask, word) as play:
        result = await play([1], unjudged=[1], because=None)
    assert rewards(result) == [EARNED * (LENGTH - 1)]


async def test_the_baseline_is_that_of_the_scored_siblings(troubled: str) -> None:
    async with playing([troubled], TroubledTask, word) as play:
        whole = trajectories(await play([1, 1], test="baseline"))
        short = trajectories(await play([1], test="baseline", num_turns=1))
        unscored = trajectories(await play([1], unjudged=[1]))
    # Two siblings with 0.75, one that was cut off at 0.25, one without a reward: the mean is theirs, not 1.75 / 4.
    group = Group(seed=1, trajectories=[*whole, *short, *unscored])
    advantages = {s.trajectory: s.advantage for s in training_samples([group], normalize_std=False)}
    mean = (WHOLE + WHOLE + EARNED) / 3
    assert advantages == pytest.approx({0: WHOLE - mean, 1: WHOLE - mean, 2: EARNED - mean})
