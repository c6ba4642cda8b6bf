"""When refused actions are the task's fault, and so the end of the run, and when they are the policy's."""

from collections.abc import Sequence

import pytest

from rl_bridge.errors import RolloutError
from rl_bridge.rollout.counts import EpisodeCounts
from rl_bridge.types import Completion, Ending, Trajectory, Turn

TURN = Turn(prompt=[1], completion=Completion(tokens=[2], logprobs=[-0.5], versions=[0], stopped=True))


def played(ending: Ending, *, turns: int = 1, tool_calls: int = 0) -> Trajectory:
    refusal = "an action has no text" if ending is Ending.REFUSED_ACTION else None
    return Trajectory(
        seed=1, turns=[TURN] * turns, ending=ending, reward=0.0, tool_calls=tool_calls, refusal=refusal
    )


REFUSED = played(Ending.REFUSED_ACTION)


def after(*trajectories: Trajectory) -> EpisodeCounts:
    counts = EpisodeCounts()
    counts.ended(trajectories)
    return counts


@pytest.mark.parametrize("others", [(), (played(Ending.ILLEGAL), played(Ending.TRUNCATED_LENGTH))])
def test_a_run_whose_environment_has_never_taken_an_action_ends_soon_and_says_why(
    others: Sequence[Trajectory],
) -> None:
    after(*others, *[REFUSED] * 3).require_understood(4)
    with pytest.raises(RolloutError, match=r"none of 4 episodes .* rollout\.task .*: an action has no text$"):
        after(*others, *[REFUSED] * 4).require_understood(4)


@pytest.mark.parametrize(
    "taken",
    [
        played(Ending.COMPLETED),
        played(Ending.TRUNCATED_TURNS),
        played(Ending.ILLEGAL, turns=2),
        played(Ending.REFUSED_ACTION, turns=2),
        played(Ending.REFUSED_ACTION, tool_calls=1),
    ],
)
def test_once_it_has_taken_one_no_policy_ends_the_run_by_what_it_writes(taken: Trajectory) -> None:
    counts = after(REFUSED, taken, *[REFUSED] * 100)
    counts.require_understood(4)
    assert counts.refused in (101, 102)
    # Nor after a resumption, when it begins with that.
    resumed = EpisodeCounts(**counts.state())
    resumed.ended([REFUSED] * 100)
    resumed.require_understood(4)
