"""Trajectories that speak bytes: token n is the byte n, so text, tokens and characters can be worked out by hand."""

from collections.abc import Sequence

from rl_bridge.records import RolloutRecords
from rl_bridge.tokens.arrays import TrajectoryTokens
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def turn(prompt: str, answer: str) -> Turn:
    tokens = list(answer.encode())
    logprobs, versions = [-0.5] * len(tokens), [3] * len(tokens)
    completion = Completion(tokens=tokens, logprobs=logprobs, versions=versions, stopped=True)
    return Turn(prompt=list(prompt.encode()), completion=completion)


def trajectory(
    *turns: Turn, reward: float = 1.0, ending: Ending = Ending.COMPLETED, seed: int = 7
) -> Trajectory:
    return Trajectory(seed=seed, turns=list(turns), ending=ending, reward=reward)


def group(number: int, *rewards: float, text: str = "hit") -> Group:
    siblings = [trajectory(turn(f"deal {number}?", text), reward=reward, seed=number) for reward in rewards]
    return Group(id=number, seed=number, trajectories=siblings)


def write(records: RolloutRecords, iteration: int, groups: Sequence[Group]) -> None:
    """Record what is chosen of an iteration; every trajectory's advantage is its reward."""
    chosen = records.choose(iteration, groups)
    tokens = [TrajectoryTokens.of(one.turns) for group in chosen.values() for one in group.trajectories]
    trajectories = [one for group in groups for one in group.trajectories]
    records.write(iteration, chosen, tokens, {index: one.reward for index, one in enumerate(trajectories)})
