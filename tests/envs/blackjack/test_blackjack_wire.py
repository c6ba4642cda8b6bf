"""BlackJack through a real server, as its callers meet it."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, TypeAlias

import pytest

from envs.blackjack_env import BlackjackAction, BlackjackEnv, BlackjackObservation, BlackjackState
from openenv_core import ExecutionError, GenericEnvClient, StepResult, SyncEnvClient, ValidationFailedError

HIT, STAND = BlackjackAction(action="hit"), BlackjackAction(action="stand")
Client: TypeAlias = SyncEnvClient[BlackjackAction, BlackjackObservation, BlackjackState]


@pytest.fixture(scope="module")
def table() -> Iterator[Client]:
    with BlackjackEnv.from_process() as client:
        yield client


def play(client: Client, seed: int, **options: Any) -> Iterator[StepResult[BlackjackObservation]]:
    """Hit below 15, then stand; yield each result."""
    result = client.reset(seed=seed, **options)
    yield result
    while not result.done:
        result = client.step(HIT if result.observation.player_total < 15 else STAND)
        yield result


def test_observations_arrive_whole(table: Client) -> None:
    episode = list(play(table, 7, natural=True, episode_id="seven"))
    assert all(isinstance(result.observation, BlackjackObservation) for result in episode)
    assert (episode[0].reward, episode[0].done, episode[0].observation.outcome) == (None, False, None)
    last = episode[-1]
    assert last.done
    assert last.reward in (-1.0, 0.0, 1.0, 1.5)
    assert last.observation.outcome in ("win", "push", "loss")
    state = table.state()
    assert (state.episode_id, state.seed, state.natural, state.sab) == ("seven", 7, True, False)
    assert (state.step_count, state.done) == (len(episode) - 1, True)


def test_sessions_with_seeds_of_their_own_play_side_by_side_as_they_play_alone(table: Client) -> None:
    with BlackjackEnv(base_url=table.base_url).sync() as sibling:
        alone = {seed: list(play(table, seed)) for seed in range(20)}
        assert len({str(episode[0].observation) for episode in alone.values()}) > 15
        for seed in range(0, 20, 2):
            turns = list(zip_longest(play(table, seed), play(sibling, seed + 1)))
            assert [one for one, _ in turns if one is not None] == alone[seed]
            assert [other for _, other in turns if other is not None] == alone[seed + 1]


def test_invalid_action_is_an_error_and_leaves_the_hand_unchanged(table: Client) -> None:
    with GenericEnvClient(base_url=table.base_url).sync() as raw:
        with pytest.raises(ExecutionError, match="no episode has begun"):
            raw.step({"action": "hit"})
        raw.reset(seed=3)
        before = raw.state()
        bad: list[Any] = [{"action": True}, {"action": "HIT"}, {"action": None}, {}, {"move": "hit"}]
        for action in bad:
            with pytest.raises(ValidationFailedError):
                raw.step(action)
        wrong: list[dict[str, Any]] = [{"natural": "maybe"}, {"decks": 6}, {"seed": -1}]
        for options in wrong:
            with pytest.raises((ExecutionError, ValidationFailedError), match=next(iter(options))):
                raw.reset(**options)
        assert raw.state() == before
        assert raw.step({"action": 0}).done
        with pytest.raises(ExecutionError, match="after the end of an episode"):
            raw.step({"action": "stand"})
        assert not raw.reset(seed=1).done
