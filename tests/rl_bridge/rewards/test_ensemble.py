"""Votes of weak verifiers: who says nothing does not count, and a tie is nobody's verdict."""

import pytest

from rl_bridge.errors import ConfigError, RewardError
from rl_bridge.rewards.function import Ensemble, VoteRule


def ensemble(rule: VoteRule, *weights: float, count: int = 3, quorum: float = 0.5) -> Ensemble:
    functions = tuple(f"verifiers.number_{number}" for number in range(len(weights) or count))
    return Ensemble(functions=functions, weights=weights, rule=rule, quorum=quorum)


@pytest.mark.parametrize(
    ("rule", "weights", "votes", "reward"),
    [
        (VoteRule.MEAN, (), [1.0, 0.0, 0.5], 0.5),
        (VoteRule.MEAN, (), [1.0, None, 0.5], 0.75),
        (VoteRule.MEAN, (3.0, 1.0, 4.0), [1.0, 0.0, None], 0.75),
        (VoteRule.MAJORITY, (), [1.0, 0.9, 0.1], 1.0),
        (VoteRule.MAJORITY, (), [1.0, 0.5, 0.1], 0.0),
        (VoteRule.MAJORITY, (), [1.0, None, 0.1], None),
        (VoteRule.MAJORITY, (3.0, 1.0, 1.0), [0.9, 0.0, 0.0], 1.0),
        (VoteRule.MAJORITY, (0.1, 0.2, 0.3), [1.0, 1.0, 0.0], None),
        (VoteRule.MIN, (), [1.0, 0.25, 0.5], 0.25),
        (VoteRule.MEAN, (), [1.0, None, None], None),
        (VoteRule.MEAN, (1.0, 2.0, 1.0), [None, 1.0, None], 1.0),
    ],
)
def test_votes_make_a_reward(
    rule: VoteRule, weights: tuple[float, ...], votes: list[float | None], reward: float | None
) -> None:
    assert ensemble(rule, *weights).reward(votes) == reward


def test_a_quorum_of_none_takes_any_vote_and_one_of_all_takes_nothing_less() -> None:
    assert ensemble(VoteRule.MEAN, quorum=0.0).reward([None, None, 0.5]) == 0.5
    assert ensemble(VoteRule.MEAN, quorum=1.0).reward([1.0, None, 0.5]) is None
    assert ensemble(VoteRule.MEAN, quorum=1.0).reward([1.0, 0.0, 0.5]) == 0.5
    # Half of what these weigh is a little more than 0.3 to the last bit.
    assert ensemble(VoteRule.MEAN, 0.3, 0.1, 0.2, quorum=0.5).reward([1.0, None, None]) == 1.0
    assert ensemble(VoteRule.MEAN, 0.3, 0.1, 0.21, quorum=0.5).reward([1.0, None, None]) is None


async def test_every_function_votes_and_the_first_failure_is_told_when_all_have_ended() -> None:
    asked: list[int] = []

    async def vote(index: int) -> float | None:
        asked.append(index)
        if index == 1:
            raise RewardError("the second is wrong")
        return 1.0

    with pytest.raises(RewardError, match="the second is wrong"):
        await ensemble(VoteRule.MEAN).evaluate(vote)
    assert asked == [0, 1, 2]
    assert await ensemble(VoteRule.MEAN, count=1).evaluate(vote) == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"functions": ()}, "at least one reward function"),
        ({"functions": ("a.b", "a.c"), "weights": (1.0,)}, "a weight for each of 2 reward functions, got 1"),
        ({"functions": ("a.b",), "weights": (0.0,)}, "weights above 0"),
        ({"functions": ("a.b",), "quorum": 1.5}, "a quorum from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Ensemble(**options)  # type: ignore[arg-type]
