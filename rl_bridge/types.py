"""What flows through the bridge: completions, turns, trajectories, groups, training samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

PolicyVersion = int
"""How many training iterations the weights have seen: 0 is the checkpoint the run began with."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingSettings:
    """How a completion is sampled.

    Truncated sampling (top-p, top-k) is left out on purpose: the trainer could not reproduce its
    log-probabilities, and the importance ratios would be wrong.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        max_new_tokens: Tokens at most.
        stop_token_ids: A completion ends after any of these; the token is part of it.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """What the policy answered to one prompt.

    Attributes:
        tokens: The generated token ids, shape [T].
        logprobs: Natural-log probability of each token under the distribution that it was sampled from
            (temperature included), shape [T].
        version: The weights that generated it.
        stopped: True where a stop token ended it, False where the length limit did.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: PolicyVersion
    stopped: bool


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """One exchange: what the policy was shown, what it answered."""

    prompt: Sequence[int]
    completion: Completion


class Ending(StrEnum):
    """Why a trajectory ended. Only the first two are the environment's doing."""

    COMPLETED = "completed"
    """The environment said done."""
    ILLEGAL = "illegal_answer"
    """The policy's answer was no legal action."""
    TRUNCATED_TURNS = "truncated_turns"
    """The limit of turns was reached."""
    TRUNCATED_LENGTH = "truncated_length"
    """The next prompt would not fit the context."""

    def is_truncated(self) -> bool:
        """True where a limit of ours, not the environment or the policy, ended the trajectory."""
        return self in (Ending.TRUNCATED_TURNS, Ending.TRUNCATED_LENGTH)


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One episode as the policy lived it.

    Attributes:
        seed: The environment's seed.
        turns: The exchanges, in order.
        ending: Why it ended.
        reward: Sum of the environment's rewards and of any penalty.
    """

    seed: int
    turns: list[Turn]
    ending: Ending
    reward: float

    @property
    def version(self) -> PolicyVersion:
        """The oldest weights that any of its tokens came from."""
        return min(turn.completion.version for turn in self.turns)


@dataclass(kw_only=True, slots=True)
class Group:
    """Siblings: trajectories that began from one seed, so that their rewards can be compared."""

    seed: int
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def version(self) -> PolicyVersion:
        """The oldest weights that any token of the group came from."""
        return min(trajectory.version for trajectory in self.trajectories)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainSample:
    """One row for the trainer.

    Attributes:
        tokens: Prompt and completion tokens, shape [L].
        loss_mask: True where the policy itself produced the token, shape [L].
        logprobs: Behaviour log-probabilities at those tokens, 0 elsewhere, shape [L].
        advantage: The trajectory's advantage, shared by its tokens.
        trajectory: Which trajectory of the batch the row belongs to; a trajectory can make several rows.
        version: The oldest weights among its tokens.
    """

    tokens: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    advantage: float
    trajectory: int
    version: PolicyVersion
