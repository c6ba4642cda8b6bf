"""Groups with nothing in them but their age."""

from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def aged_group(*versions: int, seed: int = 0, number: int = 0) -> Group:
    """One trajectory, a turn of one token for each version."""
    turns = [
        Turn(prompt=[0], completion=Completion(tokens=[1], logprobs=[-0.5], versions=[version], stopped=True))
        for version in versions
    ]
    trajectory = Trajectory(seed=seed, turns=turns, ending=Ending.COMPLETED, reward=0.0)
    return Group(id=number, seed=seed, trajectories=[trajectory])
