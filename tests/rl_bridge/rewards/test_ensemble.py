"""Votes of weak verifiers: abstentions do not count, and a tie gives no reward."""

import pytest

from rl_bridge.config import RewardConfig
from rl_bridge.rewards.function import count_votes


def reward(rule: str, *weights: float, quorum: float = 0.5) -> RewardConfig:
    functions = tuple(f"verifiers.number_{number}" for number in range(len(weights) or 3))
    return RewardConfig.model_validate(
        {"function": functions, "weights": weights, "rule": rule, "quorum": quorum}
    )


@pytest.mark.parametrize(
    ("rule", "weights", "votes", "expected"),
    [
        ("mean", (), [1.0, 0.0, 0.5], 0.5),
        ("mean", (), [1.0, None, 0.5], 0.75),
        ("mean", (3.0, 1.0, 4.0), [1.0, 0.0, None], 0.75),
        ("majority", (), [1.0, 0.9, 0.1], 1.0),
        ("majority", (), [1.0, 0.5, 0.1], 0.0),
        ("majority", (), [1.0, None, 0.1], None),
        ("majority", (3.0, 1.0, 1.0), [0.9, 0.0, 0.0], 1.0),
        ("majority", (0.1, 0.2, 0.3), [1.0, 1.0, 0.0], None),
        ("min", (), [1.0, 0.25, 0.5], 0.25),
        ("mean", (), [1.0, None, None], None),
        ("mean", (1.0, 2.0, 1.0), [None, 1.0, None], 1.0),
    ],
)
def test_votes_make_a_reward(
    rule: str, weights: tuple[float, ...], votes: list[float | None], expected: float | None
) -> None:
    assert count_votes(votes, reward(rule, *weights)) == expected


def test_a_quorum_of_none_takes_any_vote_and_one_of_all_takes_nothing_less() -> None:
    assert count_votes([None, None, 0.5], reward("mean", quorum=0.0)) == 0.5
    assert count_votes([1.0, None, 0.5], reward("mean", quorum=1.0)) is None
    assert count_votes([1.0, 0.0, 0.5], reward("mean", quorum=1.0)) == 0.5
    # Half of what these weigh is a little more than 0.3 to the last bit.
    assert count_votes([1.0, None, None], reward("mean", 0.3, 0.1, 0.2, quorum=0.5)) == 1.0
    assert count_votes([1.0, None, None], reward("mean", 0.3, 0.1, 0.21, quorum=0.5)) is None
