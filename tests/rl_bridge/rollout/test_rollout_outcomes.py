"""The policy's error and the infrastructure's, through a real server: played again, dropped, left out, never scored."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_rollout_workers import playing, until_no_session_is_left
from troubled_fixtures import EARNED, LENGTH, SAYINGS, TroubledTask

from openenv_core import LocalProcessProvider
from rl_bridge.errors import RolloutError
from rl_bridge.rollout import workers
from rl_bridge.rollout.groups import into_groups, siblings, training_samples
from rl_bridge.types import Trajectory

HERE = str(Path(__file__).parent)
WHOLE = EARNED * LENGTH


@pytest.fixture(scope="module")
def troubled() -> Iterator[str]:
    with LocalProcessProvider("troubled_fixtures:troubled_app", cwd=HERE) as provider:
        yield str(provider.url)


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BACKOFF_S", 0.001)


def rewards(episodes: list[Trajectory | None]) -> list[float | None]:
    return [None if episode is None else episode.reward for episode in episodes]


@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.parametrize("at", [0, 2, LENGTH], ids=["reset", "midst", "end"])
async def test_what_fails_once_is_played_again_in_a_new_session(
    troubled: str, saying: str, at: int, request: pytest.FixtureRequest
) -> None:
    async with playing(troubled, TroubledTask, lambda prompt: "word", sessions=4) as play:
        episodes = await play(
            list(range(8)), test=request.node.name, saying=saying, at=at, failing=[1, 5], times=1
        )
        assert (play.workers.retried, play.workers.dropped, play.workers.unscored) == (2, 0, 0)
        assert len(play.clients) == 4 + 2
    await until_no_session_is_left(troubled)
    # Nothing of the attempt that failed is left: no turn, no reward.
    assert rewards(episodes) == [WHOLE] * 8
    assert [len(episode.turns) for episode in episodes if episode] == [LENGTH] * 8


@pytest.mark.parametrize("saying", SAYINGS)
async def test_what_keeps_failing_is_dropped_and_counted_and_never_scored(
    troubled: str, saying: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(troubled, TroubledTask, lambda prompt: "word", max_attempts=3) as play:
        episodes = await play(
            siblings([1, 2, 3], 2), test=f"dropped-{saying}", saying=saying, failing=[2], times=1000
        )
        assert (play.workers.retried, play.workers.dropped, play.workers.unscored) == (6, 2, 0)
        assert str(play.workers.last_failure) == "the zygote is gone"
    assert rewards(episodes) == [WHOLE, WHOLE, None, None, WHOLE, WHOLE]
    assert [group.seed for group in into_groups(episodes, 2)] == [1, 3]
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert told == "2 of 6 episodes dropped after 3 attempts each, the last because: the zygote is gone"


async def test_nothing_but_failures_ends_the_rollout_with_their_reason(troubled: str) -> None:
    async with playing(troubled, TroubledTask, lambda prompt: "word") as play:
        with pytest.raises(RolloutError, match=r"none of 2 episodes could be played.*the zygote is gone"):
            await play([1, 2], test="nothing", failing=[1, 2], times=1000)


@pytest.mark.parametrize("because", ["the judge took too long", True])
async def test_an_end_without_a_reward_is_left_out_and_counted_apart(
    troubled: str, because: str | bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(troubled, TroubledTask, lambda prompt: "word", sessions=4) as play:
        episodes = await play(siblings([1, 2], 3), unjudged=[2], because=because)
        # It was played, so it is not played again, and its session lives on.
        assert (play.workers.retried, play.workers.dropped, play.workers.unscored) == (0, 0, 3)
        assert len(play.clients) == 4
    assert rewards(episodes) == [WHOLE] * 3 + [None] * 3
    assert [group.seed for group in into_groups(episodes, 3)] == [1]
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    reason = because if isinstance(because, str) else "nobody said why"
    assert told == f"3 of 6 episodes left out without a reward, the last because: {reason}"


async def test_an_end_without_reward_and_without_reason_is_what_was_earned(troubled: str) -> None:
    """Many environments leave the reward of a step that earned nothing at None."""
    async with playing(troubled, TroubledTask, lambda prompt: "word") as play:
        episodes = await play([1], unjudged=[1], because=None)
        assert play.workers.unscored == 0
    assert rewards(episodes) == [EARNED * (LENGTH - 1)]


async def test_nobody_judged_ends_the_rollout_with_the_reason(troubled: str) -> None:
    async with playing(troubled, TroubledTask, lambda prompt: "word") as play:
        with pytest.raises(RolloutError, match=r"none of 2 episodes has a reward.*the judge took too long"):
            await play([1, 2], unjudged=[1, 2])
        assert play.workers.unscored == 2


async def test_the_baseline_is_that_of_the_scored_siblings(troubled: str) -> None:
    async with playing(troubled, TroubledTask, lambda prompt: "word") as play:
        one = await play([1, 1, 1], test="baseline")
        lost = await play([1], test="baseline", num_turns=1)
        unscored = await play([1, 2], unjudged=[2])
    # Two siblings with 0.75, one that was cut off at 0.25, one without a reward: the mean is theirs, not 1.75 / 4.
    group = [one[0], one[1], lost[0], unscored[1]]
    assert rewards(group) == [WHOLE, WHOLE, EARNED, None]
    advantages = {
        s.trajectory: s.advantage for s in training_samples(into_groups(group, 4), normalize_std=False)
    }
    mean = (WHOLE + WHOLE + EARNED) / 3
    assert advantages == pytest.approx({0: WHOLE - mean, 1: WHOLE - mean, 2: EARNED - mean})
