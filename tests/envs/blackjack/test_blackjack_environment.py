"""The environment in-process: its rules against Gymnasium's, and what it refuses."""

import random
from collections import Counter
from typing import Any

import gymnasium
import pytest
from pydantic import ValidationError

from envs.blackjack_env import BlackjackAction, BlackjackState, InvalidResetOptionError, StepBeforeResetError
from envs.blackjack_env.server.environment import BlackjackEnvironment
from openenv_core.errors import EpisodeOverError

HIT, STAND = BlackjackAction(action="hit"), BlackjackAction(action="stand")
HANDS = 10_000


def check_against(env: BlackjackEnvironment, peer: Any, seed: int, coin: random.Random, **rules: Any) -> str:
    """Plays one seeded hand in both and compares everything that both know. Returns the outcome."""
    obs = env.reset(seed=seed, **rules)
    seen, _ = peer.reset(seed=seed)
    reward, done, steps = None, False, 0
    while True:
        assert (obs.player_total, obs.dealer_card, int(obs.usable_ace)) == seen
        assert (obs.reward, obs.done) == (reward, done)
        assert obs.player_cards == peer.unwrapped.player
        assert obs.dealer_cards == (peer.unwrapped.dealer if done else peer.unwrapped.dealer[:1])
        assert "dealer shows" in obs.text or done
        assert obs.legal_actions == ([] if done else ["hit", "stand"])
        assert env.state.step_count == steps
        if done:
            break
        assert obs.outcome is None
        assert obs.dealer_total is None
        move = coin.random() < (0.8 if obs.player_total < 15 else 0.3)
        obs = env.step(HIT if move else STAND)
        seen, reward, done, truncated, _ = peer.step(int(move))
        assert not truncated
        steps += 1
    assert reward is not None
    assert obs.outcome == ("win" if reward > 0 else "loss" if reward < 0 else "push")
    return obs.outcome


def peer_table(**rules: bool) -> Any:
    return gymnasium.make("Blackjack-v1", disable_env_checker=True, **{"sab": False, **rules})


VARIANTS: list[dict[str, bool]] = [{}, {"natural": True}, {"sab": True}, {"natural": True, "sab": True}]


@pytest.mark.parametrize("hands", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_transitions_are_those_of_gymnasium_under_rules_that_change_from_hand_to_hand(hands: int) -> None:
    env, coin = BlackjackEnvironment(), random.Random(2)
    peers = [peer_table(**rules) for rules in VARIANTS]
    outcomes = Counter(
        check_against(env, peers[seed % 4], seed, coin, **VARIANTS[seed % 4]) for seed in range(hands)
    )
    assert min(outcomes[outcome] for outcome in ("win", "push", "loss")) > hands / 30


def test_unseeded_hands_differ_and_can_be_repeated() -> None:
    env = BlackjackEnvironment()
    seeds = set()
    for _ in range(20):
        dealt = env.reset()
        seed = env.state.seed
        assert seed is not None
        seeds.add(seed)
        end = env.step(HIT)
        again = BlackjackEnvironment()
        assert again.reset(seed=seed) == dealt
        assert again.step(HIT) == end
    assert len(seeds) == 20


def test_the_state_is_a_copy_and_an_episode_has_an_id_of_its_own() -> None:
    env = BlackjackEnvironment()
    env.reset(seed=9, episode_id="mine", natural=True)
    assert env.state == BlackjackState(episode_id="mine", seed=9, natural=True)
    env.state.step_count = 99
    assert env.state.step_count == 0
    env.step(STAND)
    assert (env.state.step_count, env.state.done) == (1, True)
    env.reset()
    first = env.state.episode_id
    env.reset()
    assert env.state.episode_id != first


def test_steps_out_of_turn() -> None:
    env = BlackjackEnvironment()
    with pytest.raises(StepBeforeResetError, match=r"call reset\(\)"):
        env.step(HIT)
    env.reset(seed=1)
    end = env.step(STAND)
    for action in (HIT, STAND):
        with pytest.raises(EpisodeOverError, match=r"call reset\(\)"):
            env.step(action)
    assert env.state.step_count == 1
    env.reset(seed=1)
    assert env.step(STAND) == end


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, ">= 0"),
        ({"seed": True}, "seed"),
        ({"natural": 1}, "natural"),
        ({"sab": "yes"}, "sab"),
        ({"episode_id": 3}, "episode_id"),
        ({"decks": 6, "bet": 2}, "got bet, decks"),
    ],
)
def test_bad_reset_options_leave_the_hand_alone(options: dict[str, Any], message: str) -> None:
    env = BlackjackEnvironment()
    env.reset(seed=3)
    before = env.state
    with pytest.raises(InvalidResetOptionError, match=message):
        env.reset(**options)
    assert env.state == before
    assert env.step(STAND).done


def test_actions_are_words_or_gymnasiums_numbers_and_nothing_else() -> None:
    given: list[Any] = ["hit", "stand", 1, 0]
    assert [BlackjackAction(action=one).action for one in given] == ["hit", "stand", "hit", "stand"]
    bad: list[Any] = [True, 2, 1.0, "Hit", "", None, ["hit"]]
    for one in bad:
        with pytest.raises(ValidationError):
            BlackjackAction(action=one)
    with pytest.raises(ValidationError):
        BlackjackAction.model_validate({"action": "hit", "bet": 1})
