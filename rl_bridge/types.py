"""What flows through the bridge: completions, turns, trajectories, groups, training samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

PolicyVersion = int
"""How many training iterations the weights have seen: 0 is the checkpoint the run began with."""

NO_VERSION: PolicyVersion = -1
"""Stands for the weights of a token that no policy generated."""


def _oldest(versions: Iterable[PolicyVersion]) -> PolicyVersion:
    """Where there is no token 0: what cannot be shown to be recent counts as old."""
    return min(versions, default=0)


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingSettings:
    """How a completion is sampled.

    Truncated sampling (top-p, top-k) is left out on purpose: the trainer could not reproduce its log-probabilities, and
    the importance ratios would be wrong.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
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
        versions: The weights that each token was sampled from, shape [T]: they differ where an engine took new
            ones in the middle.
        stopped: True where a stop token ended it, False where the length limit did.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[PolicyVersion]
    stopped: bool

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"expected a log-probability and a version with each of {len(self.tokens)} tokens, "
                f"got {len(self.logprobs)} and {len(self.versions)}"
            )

    @property
    def version(self) -> PolicyVersion:
        """The oldest weights that any of its tokens came from; 0 where it has none."""
        return _oldest(self.versions)


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """One exchange: the prompt and the policy's completion."""

    prompt: Sequence[int]
    completion: Completion


class Ending(StrEnum):
    """Why an episode ended.

    Completed, ill-formed and truncated episodes are trajectories and are trained on, with what they earned until then;
    truncated ones as the algorithm's settings say. Failed ones tell nothing of the policy: they have no reward, take no
    part in their group's baseline, and are counted.
    """

    COMPLETED = "completed"
    """The environment said done."""
    ILLEGAL = "illegal_answer"
    """The policy's answer was no legal action. It is penalised."""
    UNPARSABLE_CALL = "unparsable_call"
    """The policy's answer began a call of a tool that cannot be read. It is penalised likewise."""
    REFUSED_ACTION = "refused_action"
    """The environment does not take the action that the policy's answer meant. It is penalised likewise."""
    TRUNCATED_TURNS = "truncated_turns"
    """The limit of turns, or of steps, was reached."""
    TRUNCATED_ENVIRONMENT = "truncated_environment"
    """The environment cut the episode off by a limit of its own."""
    TRUNCATED_LENGTH = "truncated_length"
    """The next prompt would not fit the context, or an answer that calls tools was cut off."""
    TRUNCATED_TIME = "truncated_time"
    """The limit of time was reached."""
    FAILED_POLICY = "failed_policy"
    """No engine answered, however often it was tried."""
    FAILED_ENVIRONMENT = "failed_environment"
    """The environment failed, or did not answer within its deadline, however often it was tried."""
    FAILED_REWARD = "failed_reward"
    """Nobody could say how well it was played."""

    def is_truncated(self) -> bool:
        """True where a limit ended the episode, ours or the environment's, and not the game or the policy."""
        return self.name.startswith("TRUNCATED_")

    def is_failure(self) -> bool:
        """True where something beside the policy ended it, so that there is nothing to train on."""
        return self in (Ending.FAILED_POLICY, Ending.FAILED_ENVIRONMENT, Ending.FAILED_REWARD)


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One episode as the policy lived it.

    Attributes:
        reward: Sum of the environment's rewards and of any penalty.
        tool_calls: Calls of tools that the environment was asked for.
        refusal: Why the environment did not take the last action, in words; None where it did.
        scores: What the parts of the environment's rubric gave, by path, summed over the steps.
    """

    seed: int
    turns: list[Turn]
    ending: Ending
    reward: float
    tool_calls: int = 0
    refusal: str | None = None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion:
        """The oldest weights that any of its tokens came from; 0 where it has none."""
        return _oldest(version for turn in self.turns for version in turn.completion.versions)


@dataclass(kw_only=True, slots=True)
class Group:
    """Siblings: trajectories that began from one seed, so that their rewards can be compared.

    Attributes:
        id: Its number in the run, counted from 0.
        environment: Which it was played in, by its name in the run's configuration.
    """

    id: int = 0
    seed: int
    environment: str = ""
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def version(self) -> PolicyVersion:
        """The oldest weights that any token of the group came from; 0 where it has none."""
        return _oldest(
            version
            for trajectory in self.trajectories
            for turn in trajectory.turns
            for version in turn.completion.versions
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainSample:
    """One row for the trainer.

    Attributes:
        tokens: Prompt and completion tokens, shape [L].
        loss_mask: True where the policy itself produced the token, shape [L].
        logprobs: Behaviour log-probabilities at those tokens, 0 elsewhere, shape [L].
        versions: The weights that those tokens were sampled from, `NO_VERSION` elsewhere, shape [L].
        advantage: The trajectory's advantage, shared by its tokens.
        trajectory: Which trajectory of the batch the row belongs to; a trajectory can make several rows.
        group: Which group of the batch the trajectory belongs to.
        reward: The trajectory's reward, which its last token earns.
    """

    tokens: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    versions: Sequence[PolicyVersion]
    advantage: float
    trajectory: int
    group: int = 0
    reward: float = 0.0

    @property
    def version(self) -> PolicyVersion:
        """The oldest weights that any of its tokens came from; 0 where no policy generated any."""
        return _oldest(version for version in self.versions if version != NO_VERSION)
