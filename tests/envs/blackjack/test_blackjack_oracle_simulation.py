"""The oracle against simulated hands: an array program written apart from it, and Gymnasium's own class.

Seeds are fixed, so the tests do not flicker. The bounds are 4.5 standard deviations or more, so another
seed would pass as well, save about once in ten thousand times.
"""

import math
import random
from collections import Counter

import numpy as np
import pytest
from gymnasium.envs.toy_text.blackjack import BlackjackEnv as Table
from numpy.typing import NDArray

from envs.blackjack_env import baselines as b
from envs.blackjack_env import oracle
from envs.blackjack_env.odds import standing_natural
from envs.blackjack_env.oracle import DECISION_STATES, DecisionState, Policy, Rules

Ints = NDArray[np.int64]
DECK = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10])


def arbitrary_policy(seed: int) -> dict[DecisionState, oracle.Choice]:
    """A policy without rhyme or reason: it visits states that sensible ones never see."""
    coin = random.Random(seed)
    return {state: "hit" if coin.random() < 0.6 else "stand" for state in DECISION_STATES}


def hit_table(policy: Policy) -> NDArray[np.bool_]:
    """A deterministic policy as an array [total, usable_ace, dealer] of whether it hits."""
    table = np.zeros((22, 2, 11), dtype=bool)
    for state in DECISION_STATES:
        table[state.total, int(state.usable_ace), state.dealer] = oracle.choice_at(policy, state).get(
            "hit", 0
        )
    return table


def value(low: Ints, ace: NDArray[np.bool_]) -> Ints:
    return np.where(ace & (low + 10 <= 21), low + 10, low)


def finish(low: Ints, ace: NDArray[np.bool_], dealer: Ints, hits: NDArray[np.bool_], rng: np.random.Generator,
           first: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:  # fmt: skip
    """Plays hands to their end; `first`, where given, overrides the first decision. Returns the rewards."""
    low, ace = low.copy(), ace.copy()
    playing = np.ones(len(low), dtype=bool)
    while playing.any():
        total = np.minimum(value(low, ace), 21)
        soft = ace & (low + 10 <= 21)
        wants = hits[total, soft.astype(int), dealer] if first is None else first
        first = None
        playing &= wants
        cards = rng.choice(DECK, len(low))
        low = np.where(playing, low + cards, low)
        ace = ace | (playing & (cards == 1))
        playing &= low <= 21
    hole = rng.choice(DECK, len(low))
    dealer_low, dealer_ace = dealer + hole, (dealer == 1) | (hole == 1)
    while (draws := value(dealer_low, dealer_ace) < 17).any():
        cards = rng.choice(DECK, len(low))
        dealer_low = np.where(draws, dealer_low + cards, dealer_low)
        dealer_ace = dealer_ace | (draws & (cards == 1))
    mine, his = value(low, ace), value(dealer_low, dealer_ace)
    his = np.where(his > 21, 0, his)
    return np.where(low > 21, -1.0, np.sign(mine - his).astype(float))


@pytest.mark.parametrize(
    "policy",
    [oracle.optimal_policy(), b.ThresholdRule(15, 18), arbitrary_policy(1), arbitrary_policy(2)],
    ids=["optimum", "blind", "arbitrary-1", "arbitrary-2"],
)
def test_returns_of_whole_games(policy: Policy) -> None:
    hands = 1_000_000
    rng = np.random.default_rng(20)
    one, two, dealer = rng.choice(DECK, (3, hands))
    rewards = finish(one + two, (one == 1) | (two == 1), dealer, hit_table(policy), rng)
    exact = oracle.evaluate(policy)
    assert abs(rewards.mean() - exact.mean_return) < 4.5 * math.sqrt(exact.variance / hands)
    assert rewards.var() == pytest.approx(exact.variance, abs=0.01)
    for reward, chance in ((1, exact.win), (0, exact.push), (-1, exact.loss)):
        assert abs((rewards == reward).mean() - chance) < 4.5 * math.sqrt(chance * (1 - chance) / hands)


def test_every_action_value() -> None:
    """Starts at each decision state with each action, then plays the optimum: 560 figures."""
    hands = 3_000
    rng = np.random.default_rng(21)
    states = np.repeat(np.array([(s.total, s.usable_ace, s.dealer) for s in DECISION_STATES]), hands, axis=0)
    soft = states[:, 1].astype(bool)
    low = np.where(soft, states[:, 0] - 10, states[:, 0])
    hits = hit_table(oracle.optimal_policy())
    exact = oracle.action_values()
    for action in (0, 1):
        first = np.full(len(low), bool(action))
        rewards = finish(low, soft, states[:, 2], hits, rng, first).reshape(-1, hands)
        expected = np.array([exact[state][action] for state in DECISION_STATES])
        # A value of exactly -1 has no spread; elsewhere the sample's own spread serves.
        spread = np.maximum(rewards.std(axis=1), 0.05) / math.sqrt(hands)
        z = (rewards.mean(axis=1) - expected) / spread
        assert np.abs(z).max() < 5.0
        # 280 independent z values: their squares average 1 with a spread of 0.085.
        assert np.square(z).mean() == pytest.approx(1.0, abs=0.4)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy", "rules"),
    [
        (oracle.optimal_policy(), Rules()),
        (arbitrary_policy(3), Rules(natural=True)),
        (oracle.optimal_policy(), Rules(sab=True)),
        (b.random_policy, Rules(natural=True, sab=True)),
    ],
    ids=["optimum", "arbitrary-natural", "optimum-sab", "random-both"],
)
def test_gymnasium_agrees(policy: Policy, rules: Rules) -> None:
    hands = 30_000
    table = Table(natural=rules.natural, sab=rules.sab)
    coin = random.Random(4)
    chances = {state: oracle.choice_at(policy, state).get("hit", 0.0) for state in DECISION_STATES}
    visits: Counter[DecisionState] = Counter()
    rewards = []
    seen, _ = table.reset(seed=22)
    for _ in range(hands):
        done, reward = False, 0.0
        while not done:
            state = DecisionState(seen[0], bool(seen[2]), seen[1])
            visits[state] += 1
            seen, reward, done, _, _ = table.step(int(coin.random() < chances[state]))  # type: ignore[no-untyped-call]
        rewards.append(reward)
        seen, _ = table.reset()
    exact = oracle.evaluate(policy, rules=rules)
    assert abs(np.mean(rewards) - exact.mean_return) < 4.5 * math.sqrt(exact.variance / hands)
    wins = np.mean([reward > 0 for reward in rewards])
    assert abs(wins - exact.win) < 4.5 * math.sqrt(exact.win * (1 - exact.win) / hands)
    # No state comes twice in a hand, so the visits are binomial; rare ones get room for their skew.
    assert set(visits) <= set(exact.visits)
    for state, chance in exact.visits.items():
        expected = hands * chance
        assert abs(visits[state] - expected) < 5.0 * math.sqrt(expected) + 3.0, state


@pytest.mark.parametrize("rules", [Rules(), Rules(natural=True), Rules(sab=True)], ids=str)
@pytest.mark.parametrize("upcard", [1, 6, 10])
def test_gymnasium_pays_naturals_alike(rules: Rules, upcard: int) -> None:
    hands = 3_000
    table = Table(natural=rules.natural, sab=rules.sab)
    table.reset(seed=23)
    rewards = np.empty(hands)
    for i in range(hands):
        table.player, table.dealer = [10, 1], [upcard, int(table.np_random.choice(DECK))]
        _, rewards[i], _, _, _ = table.step(0)  # type: ignore[no-untyped-call]
    exact = standing_natural(upcard, rules)
    spread = math.sqrt((exact.square - exact.mean**2) / hands)
    assert abs(rewards.mean() - exact.mean) <= 4.5 * spread + 1e-12
