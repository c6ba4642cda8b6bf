"""Votes of weak verifiers: abstentions do not count, and a tie gives no reward."""

import pytest

from rl_bridge.config import RewardConfig
from rl_bridge.rewards.function import count_votes


def reward(rule: str, *, quorum: float = 0.5) -> RewardConfig:
    functions = tuple(f"verifiers.number_{number}" for number in range(3))
    return RewardConfig.model_validate({"function": functions, "rule": rule, "quorum": quorum})


@pytest.mark.parametrize(
    ("rule", "votes", "expected"),
    [
        ("mean", [1.0, 0.0, 0.5], 0.5),
        ("mean", [1.0, None, 0.5], 0.75),
        ("mean", [1.0, None, None], None),
        ("majority", [1.0, 0.9, 0.1], 1.0),
        ("majority", [1.0, 0.5, 0.1], 0.0),
        ("majority", [1.0, None, 0.1], None),
    ],
)
def test_votes_make_a_reward(rule: str, votes: list[float | None], expected: float | None) -> None:
    assert count_votes(votes, reward(rule)) == expected


def test_a_quorum_of_none_takes_any_vote_and_one_of_all_takes_nothing_less() -> None:
    assert count_votes([None, None, 0.5], reward("mean", quorum=0.0)) == 0.5
    assert count_votes([None, None, None], reward("mean", quorum=0.0)) is None
    assert count_votes([1.0, None, 0.5], reward("mean", quorum=1.0)) is None
    assert count_votes([1.0, 0.0, 0.5], reward("mean", quorum=1.0)) == 0.5
