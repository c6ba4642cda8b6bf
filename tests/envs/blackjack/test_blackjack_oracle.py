"""The oracle against hand-worked values, published figures, its own second way of counting, and Gymnasium's hands.

Seeds are fixed, so the tests do not flicker; bounds are 4.5 standard deviations or more.
"""

import math
import random
from collections import Counter

import numpy as np
import pytest
from gymnasium.envs.toy_text.blackjack import BlackjackEnv as Table

from envs.blackjack_env import baselines as b
from envs.blackjack_env import oracle
from envs.blackjack_env.oracle import (
    DECISION_STATES,
    DecisionState,
    Policy,
    Rules,
    deal_distribution,
    dealer_distribution,
)

ALL_RULES = [Rules(), Rules(natural=True), Rules(sab=True), Rules(natural=True, sab=True)]


def test_dealer_by_hand() -> None:
    for upcard in range(1, 11):
        assert math.isclose(math.fsum(dealer_distribution(upcard).values()), 1.0)
    # Published odds of a bust with an infinite deck when the dealer stands on soft 17, to four places.
    published = {1: 0.1153, 2: 0.3536, 3: 0.3739, 4: 0.3945, 5: 0.4164, 6: 0.4232, 7: 0.2623, 8: 0.2447}
    published |= {9: 0.2284, 10: 0.2121}
    for upcard, bust in published.items():
        assert dealer_distribution(upcard)[22] == pytest.approx(bust, abs=6e-5)


def test_optimal_policy_is_basic_strategy() -> None:
    def published(total: int, usable_ace: bool, dealer: int) -> str:
        # Hit-or-stand basic strategy for a dealer who stands on soft 17 (Thorp 1966; the same grid is
        # figure 5.2 of Sutton and Barto).
        if usable_ace:
            return "hit" if total <= 17 or (total == 18 and dealer in (1, 9, 10)) else "stand"
        if total <= 11 or (total == 12 and dealer in (2, 3)):
            return "hit"
        return "hit" if total <= 16 and (dealer == 1 or dealer >= 7) else "stand"

    policy = oracle.optimal_policy()
    assert set(policy) == set(DECISION_STATES)
    assert len(DECISION_STATES) == 280
    assert {s: policy[s] for s in policy if policy[s] != published(*s)} == {}


@pytest.mark.slow
def test_baselines_have_their_known_returns_in_order() -> None:
    table = b.baselines()
    assert list(table) == ["random", "always_stand", "hit_below_17", "best_blind", "basic_strategy"]
    returns = [baseline.evaluation.mean_return for baseline in table.values()]
    assert returns == pytest.approx([-0.3959, -0.1864, -0.0793, -0.0640, -0.0466], abs=6e-5)
    assert b.best_threshold_rule() == b.ThresholdRule(hard=15, soft=18)
    assert oracle.evaluate(b.always_hit).mean_return == pytest.approx(-1.0)


@pytest.mark.parametrize("rules", ALL_RULES, ids=str)
def test_forward_and_backward_sweep_agree_and_probabilities_sum_to_one(rules: Rules) -> None:
    best = oracle.evaluate(oracle.optimal_policy(), rules=rules)
    assert math.isclose(best.mean_return, oracle.optimal_return(rules), abs_tol=1e-13)
    assert math.isclose(best.win + best.push + best.loss, 1.0)
    if rules == Rules():
        assert math.isclose(best.mean_return, best.win - best.loss)
        assert math.isclose(best.variance, best.win + best.loss - best.mean_return**2)


def test_payout_of_naturals_by_hand() -> None:
    plain, bonus, sab = (oracle.evaluate(b.always_stand, rules=rules) for rules in ALL_RULES[:3])
    natural = 2 * (1 / 13) * (4 / 13)
    upcard = {card: 4 / 13 if card == 10 else 1 / 13 for card in range(1, 11)}
    dealer_21 = sum(chance * dealer_distribution(card)[21] for card, chance in upcard.items())
    # The bonus adds half a bet for each natural that is not met by a 21.
    assert math.isclose(bonus.mean_return - plain.mean_return, 0.5 * natural * (1 - dealer_21))
    # Sutton and Barto's rule turns draws against a 21 of three cards and more into wins.
    assert math.isclose(sab.mean_return - plain.mean_return, natural * (dealer_21 - natural))
    assert math.isclose(plain.push - sab.push, natural * (dealer_21 - natural))
    assert bonus.win == plain.win
    both = oracle.evaluate(b.always_stand, rules=Rules(natural=True, sab=True))
    assert both == sab


def test_a_policy_is_a_mapping_a_function_or_chances() -> None:
    rule = b.hit_below(17)
    mapping = {(s.total, s.usable_ace, s.dealer): rule(*s) for s in DECISION_STATES}
    assert oracle.evaluate(mapping) == oracle.evaluate(rule)
    # With one coin at one state, the exact return is linear in its bias.
    state = DecisionState(13, False, 10)
    best = dict(oracle.optimal_policy())
    ends = [oracle.evaluate(best | {state: move}).mean_return for move in ("stand", "hit")]
    mixed: dict[DecisionState, oracle.Choice] = {**best, state: {"stand": 0.75, "hit": 0.25}}
    assert math.isclose(oracle.evaluate(mixed).mean_return, 0.75 * ends[0] + 0.25 * ends[1])
    # States that are never reached are not visited.
    assert set(oracle.evaluate(b.always_stand).visits) == set(deal_distribution())


def test_illegal_answers_cost_the_penalty() -> None:
    everywhere = oracle.evaluate(lambda *_: None, illegal_return=-2.0)
    assert everywhere.mean_return == pytest.approx(-2.0)
    assert everywhere.illegal == pytest.approx(1.0)
    assert everywhere.variance == pytest.approx(0.0, abs=1e-12)
    assert oracle.agreement(lambda *_: None) == oracle.Agreement(0.0, 0.0)


def test_agreement() -> None:
    assert oracle.agreement(oracle.optimal_policy()) == oracle.Agreement(1.0, 1.0)
    assert oracle.agreement(b.random_policy).unweighted == pytest.approx(0.5)
    # Wrong at one state: 279 of 280, and less by that state's share of the decisions.
    state = DecisionState(16, False, 10)
    policy = dict(oracle.optimal_policy()) | {state: "stand"}
    visits = oracle.evaluate(policy).visits
    got = oracle.agreement(policy)
    assert math.isclose(got.unweighted, 279 / 280)
    assert math.isclose(got.weighted, 1 - visits[state] / math.fsum(visits.values()))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({}, "found none"),
        (lambda *_: 1, "against 1, got 1"),
        (lambda *_: {"hit": 0.5}, "sum to 1"),
        (lambda *_: {"hit": math.nan, "stand": 1.0}, ">= 0"),
    ],
)
def test_broken_policies_are_named(policy: oracle.Policy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oracle.evaluate(policy)


def arbitrary_policy(seed: int) -> dict[DecisionState, oracle.Choice]:
    """A policy without rhyme or reason: it visits states that sensible ones never see."""
    coin = random.Random(seed)
    return {state: "hit" if coin.random() < 0.6 else "stand" for state in DECISION_STATES}


ARBITRARY, OPTIMAL = arbitrary_policy(1), oracle.optimal_policy()
MANY = [
    (OPTIMAL, Rules()),
    (ARBITRARY, Rules()),
    (OPTIMAL, Rules(sab=True)),
    (b.random_policy, Rules(natural=True, sab=True)),
]


@pytest.mark.parametrize(
    ("policy", "rules", "hands"),
    [
        (arbitrary_policy(3), Rules(natural=True), 5_000),
        *(pytest.param(policy, rules, 60_000, marks=pytest.mark.soak) for policy, rules in MANY),
    ],
)
def test_gymnasium_agrees(policy: Policy, rules: Rules, hands: int) -> None:
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
