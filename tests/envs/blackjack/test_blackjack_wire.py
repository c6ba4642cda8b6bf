"""BlackJack through a real server, as its callers meet it."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest

from envs.blackjack_env import BlackjackAction, BlackjackEnv, BlackjackObservation, BlackjackState
from openenv_core import ExecutionFailed, GenericEnvClient, StepResult, SyncEnvClient, ValidationFailed

HIT, STAND = BlackjackAction(action="hit"), BlackjackAction(action="stand")
Client: TypeAlias = SyncEnvClient[BlackjackAction, BlackjackObservation, BlackjackState]


@pytest.fixture(scope="module")
def table() -> Iterator[Client]:
    with BlackjackEnv.from_process() as client:
        yield client


def play(client: Client, seed: int, **options: Any) -> list[StepResult[BlackjackObservation]]:
    """Hits below 15, then stands."""
    episode = [client.reset(seed=seed, **options)]
    while not episode[-1].done:
        total = episode[-1].observation.player_total
        episode.append(client.step(HIT if total < 15 else STAND))
    return episode


def test_the_same_seed_twice_is_the_same_episode(table: Client) -> None:
    episodes = [play(table, seed) for seed in range(60)]
    assert [play(table, seed) for seed in range(60)] == episodes
    # And other seeds are other episodes: 60 deals of three visible cards rarely coincide.
    deals = {str(episode[0].observation) for episode in episodes}
    assert len(deals) > 50


def test_observations_arrive_whole(table: Client) -> None:
    episode = play(table, 7, natural=True, episode_id="seven")
    assert all(isinstance(result.observation, BlackjackObservation) for result in episode)
    assert (episode[0].reward, episode[0].done, episode[0].observation.outcome) == (None, False, None)
    last = episode[-1]
    assert last.done
    assert last.reward in (-1.0, 0.0, 1.0, 1.5)
    assert last.observation.outcome in ("win", "push", "loss")
    state = table.state()
    assert (state.episode_id, state.seed, state.natural, state.sab) == ("seven", 7, True, False)
    assert (state.step_count, state.done) == (len(episode) - 1, True)


def test_an_unseeded_hand_can_be_repeated(table: Client) -> None:
    dealt = table.reset()
    seed = table.state().seed
    assert table.reset(seed=seed).observation == dealt.observation


def test_siblings_share_the_deal_and_sessions_do_not_touch(table: Client) -> None:
    with BlackjackEnv(base_url=table.base_url).sync() as sibling:
        for seed in range(20):
            assert table.reset(seed=seed).observation == sibling.reset(seed=seed).observation
            assert table.step(HIT) == sibling.step(HIT)
        # Interleaved, each with a seed of its own: both go as they go alone.
        alone = {seed: play(table, seed) for seed in range(40)}
        for mine, other in zip(range(0, 40, 2), range(1, 40, 2), strict=True):
            got = {mine: [table.reset(seed=mine)], other: [sibling.reset(seed=other)]}
            while not (got[mine][-1].done and got[other][-1].done):
                for seed, client in ((mine, table), (other, sibling)):
                    if not got[seed][-1].done:
                        total = got[seed][-1].observation.player_total
                        got[seed].append(client.step(HIT if total < 15 else STAND))
            assert got == {mine: alone[mine], other: alone[other]}


def test_a_step_after_the_end_is_an_error_and_the_session_lives(table: Client) -> None:
    table.reset(seed=1)
    table.step(STAND)
    with pytest.raises(ExecutionFailed, match="after the end of the hand"):
        table.step(STAND)
    assert not table.reset(seed=1).done


def test_a_step_before_reset_is_an_error(table: Client) -> None:
    with BlackjackEnv(base_url=table.base_url).sync() as fresh:
        with pytest.raises(ExecutionFailed, match=r"before the first step"):
            fresh.step(HIT)
        assert fresh.reset(seed=2) == table.reset(seed=2)


NO_ACTIONS: list[Any] = [True, False, 2, "HIT", "", None, [], 1.0]


@pytest.mark.parametrize("action", [*({"action": bad} for bad in NO_ACTIONS), {}, {"move": "hit"}])
def test_invalid_actions_leave_the_hand_as_it_was(table: Client, action: dict[str, Any]) -> None:
    with GenericEnvClient(base_url=table.base_url).sync() as raw:
        raw.reset(seed=3)
        before = raw.state()
        with pytest.raises(ValidationFailed):
            raw.step(action)
        assert raw.state() == before
        assert raw.step({"action": 0}).done


@pytest.mark.parametrize("options", [{"natural": "maybe"}, {"sab": 2}, {"decks": 6}, {"seed": -1}])
def test_bad_reset_options_leave_the_hand_as_it_was(table: Client, options: dict[str, Any]) -> None:
    table.reset(seed=4)
    before = table.state()
    with pytest.raises((ExecutionFailed, ValidationFailed)) as refused:
        table.reset(**options)
    assert next(iter(options)) in str(refused.value)
    assert table.state() == before
    assert table.step(STAND).done
