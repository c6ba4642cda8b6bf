"""Kuhn poker's oracle: what is known of the game, and another implementation's figures."""

from random import Random

import pytest
from missing import require

from envs.kuhn_env import oracle
from envs.kuhn_env.models import SEATS, KuhnAction
from envs.kuhn_env.server.environment import KuhnEnvironment


def drawn_policy(rng: Random) -> oracle.Policy:
    bets = {point: rng.random() for point in oracle.INFORMATION_SETS}
    return lambda card, history: bets[card, history]


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_no_answer_gains_on_an_equilibrium(alpha: float) -> None:
    def policy(card: int, history: str) -> float:
        return oracle.equilibrium(card, history, alpha)

    assert oracle.nash_conv(policy) == pytest.approx(0, abs=1e-12)
    assert oracle.value(policy, policy) == pytest.approx(-1 / 18)


def test_a_best_response_wins_what_it_says() -> None:
    assert oracle.nash_conv(oracle.uniform) / 2 == pytest.approx(11 / 24)
    rng = Random(0)
    for _ in range(10):
        policy = drawn_policy(rng)
        first, second = oracle.best_response(0, policy), oracle.best_response(1, policy)
        assert oracle.value(first, policy) == pytest.approx(first.value)
        assert -oracle.value(policy, second) == pytest.approx(second.value)
        assert first.value >= oracle.value(drawn_policy(rng), policy)


def test_the_game_pays_what_the_oracle_says() -> None:
    rng, policy = Random(1), drawn_policy(Random(2))
    won, count = 0.0, 4000
    game = KuhnEnvironment()
    for seed in range(count):
        game.reset(seed=seed)
        while True:
            bet = rng.random() < policy(game.state.cards[game.turn[0]], game.state.history)
            seen = game.step({game.turn[0]: KuhnAction(action="bet" if bet else "pass")})
            if seen[SEATS[0]].done:
                break
        assert seen[SEATS[0]].reward == -seen[SEATS[1]].reward
        won += seen[SEATS[0]].reward
    assert won / count == pytest.approx(oracle.value(policy, policy), abs=5 * 1.5 / count**0.5)


@pytest.mark.soak
def test_exploitability_is_that_of_open_spiel() -> None:
    pyspiel = require("pyspiel")
    policies = require("open_spiel.python.policy")
    exploitability = require("open_spiel.python.algorithms.exploitability")
    game, rng = pyspiel.load_game("kuhn_poker"), Random(3)
    for _ in range(100):
        policy, table = drawn_policy(rng), policies.TabularPolicy(game)
        for card, history in oracle.INFORMATION_SETS:
            bet = policy(card, history)
            table.policy_for_key(f"{card}{history}")[:] = [1 - bet, bet]
        theirs = exploitability.exploitability(game, table)
        assert oracle.nash_conv(policy) / 2 == pytest.approx(theirs, abs=1e-9)
