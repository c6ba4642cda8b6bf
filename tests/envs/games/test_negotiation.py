"""The negotiation: exact rewards, private values, and offers that are none."""

from random import Random

import pytest

from envs.negotiation_env.division import TOTAL_VALUE, best_joint_worth, draw_pool, worth
from envs.negotiation_env.models import SEATS, NegotiationAction
from envs.negotiation_env.server.environment import MAX_TURNS, NegotiationEnvironment


def play(game: NegotiationEnvironment, policy: str, seed: int) -> tuple[float, float]:
    seen, rng = game.reset(seed=seed), Random(seed)
    while not seen[SEATS[0]].done:
        seat = game.turn[0]
        action = game.POLICIES[policy](seen[seat], rng)
        game.check(seat, action)
        seen = game.step({seat: action})
    return seen["first"].reward, seen["second"].reward


def test_both_get_what_their_share_is_worth_to_them() -> None:
    game, joint = NegotiationEnvironment(), {"concede": 0.0, "random": 0.0}
    for policy in joint:
        for seed in range(100):
            rewards = play(game, policy, seed)
            state = game.state
            assert all(worth(state.items, values) == TOTAL_VALUE for values in state.values.values())
            if state.got is None:
                assert rewards == (0, 0)
            else:
                assert rewards == tuple(worth(state.got[seat], state.values[seat]) / 10 for seat in SEATS)
                for item, count in state.items.items():
                    assert sum(share[item] for share in state.got.values()) == count
            assert sum(rewards) * TOTAL_VALUE <= best_joint_worth(state.items, state.values)
            joint[policy] += sum(rewards) / 100
    assert joint["concede"] > joint["random"] + 0.3
    assert draw_pool(Random(4)) == draw_pool(Random(4))


def test_a_player_sees_its_own_values_and_what_was_said() -> None:
    game = NegotiationEnvironment()
    seen = game.reset(seed=3)
    values = {seat: seen[seat].values for seat in SEATS}
    assert values == game.state.values
    assert values["first"] != values["second"]
    seen = game.step({"first": NegotiationAction(message="All mine!", take=seen["first"].items)})
    assert "The other: All mine!" in seen["second"].text
    assert "You are offered nothing." in seen["second"].text
    assert (seen["first"].offer, seen["first"].values) == (None, values["first"])
    seen = game.step({"second": NegotiationAction(accept=True)})
    assert (seen["first"].reward, seen["second"].reward, seen["second"].terminated) == (1, 0, True)
    assert "You get nothing: 0." in seen["second"].text


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"accept": True}, "there is no offer"),
        ({"take": {"books": 99}}, "books, not 99"),
    ],
)
def test_what_is_no_offer_is_refused(action: dict[str, object], message: str) -> None:
    game = NegotiationEnvironment()
    game.reset(seed=3)
    with pytest.raises(ValueError, match=message):
        game.check("first", NegotiationAction.model_validate(action))


def test_without_an_agreement_nobody_gets_anything() -> None:
    game = NegotiationEnvironment()
    game.reset(seed=3)
    for turn in range(MAX_TURNS):
        seen = game.step({SEATS[turn % 2]: NegotiationAction(message="No.")})
    assert [one.reward for one in seen.values()] == [0, 0]
    assert "There is no agreement" in seen["first"].text
