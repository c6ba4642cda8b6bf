"""Groups with nothing in them but their age, and samples."""

from collections.abc import Sequence

from rl_bridge.types import NO_VERSION, Completion, Ending, Group, TrainSample, Trajectory, Turn


def aged_group(*versions: int, seed: int = 0, number: int = 0) -> Group:
    """One trajectory, a turn of one token for each version."""
    turns = [
        Turn(prompt=[0], completion=Completion(tokens=[1], logprobs=[-0.5], versions=[version], stopped=True))
        for version in versions
    ]
    trajectory = Trajectory(seed=seed, turns=turns, ending=Ending.COMPLETED, reward=0.0)
    return Group(id=number, seed=seed, trajectories=[trajectory])


def sample(
    tokens: Sequence[int],
    mask: Sequence[int],
    *,
    trajectory: int = 0,
    advantage: float = 1.0,
    logprob: float = -1.0,
    reward: float = 0.0,
) -> TrainSample:
    return TrainSample(
        tokens=list(tokens),
        loss_mask=[bool(one) for one in mask],
        logprobs=[logprob - 0.1 * place if one else 0.0 for place, one in enumerate(mask)],
        versions=[0 if one else NO_VERSION for one in mask],
        advantage=advantage,
        trajectory=trajectory,
        reward=reward,
    )
