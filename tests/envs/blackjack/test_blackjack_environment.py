"""The environment in-process: its rules against Gymnasium's, and what it refuses."""

import random
from collections import Counter
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.toy_text.blackjack import sum_hand

from envs.blackjack_env import BlackjackAction
from envs.blackjack_env.oracle import DECISION_STATES, DecisionState
from envs.blackjack_env.server.environment import BlackjackEnvironment
from envs.blackjack_env.table import observe_decision

HIT, STAND = BlackjackAction(action="hit"), BlackjackAction(action="stand")


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
    assert obs.dealer_total == sum_hand(peer.unwrapped.dealer)  # type: ignore[no-untyped-call]
    assert reward is not None
    assert obs.outcome == ("win" if reward > 0 else "loss" if reward < 0 else "push")
    return obs.outcome


VARIANTS = [{"natural": natural, "sab": sab} for natural in (False, True) for sab in (False, True)]


@pytest.mark.parametrize("hands", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_transitions_are_those_of_gymnasium_under_rules_that_change_from_hand_to_hand(hands: int) -> None:
    env, coin = BlackjackEnvironment(), random.Random(2)
    peers = [gymnasium.make("Blackjack-v1", disable_env_checker=True, **rules) for rules in VARIANTS]
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


def test_observation_of_a_decision_is_what_a_reset_that_deals_it_returns() -> None:
    table = BlackjackEnvironment()
    compared = set()
    for seed in range(3000):
        dealt = table.reset(seed=seed)
        state = DecisionState(dealt.player_total, dealt.usable_ace, dealt.dealer_card)
        made = observe_decision(state)
        if made.player_cards == dealt.player_cards:
            assert made == dealt
            compared.add(state)
    assert {state.usable_ace for state in compared} == {True, False}
    assert len(compared) > 150
    for state in DECISION_STATES:
        made = observe_decision(state)
        assert (made.player_total, made.usable_ace, made.dealer_card) == state
        assert sum(made.player_cards) + 10 * made.usable_ace == made.player_total
        assert 1 <= min(made.player_cards) <= max(made.player_cards) <= 10
        assert (1 in made.player_cards) is made.usable_ace
