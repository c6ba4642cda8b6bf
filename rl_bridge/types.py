"""The bridge's data types: completions, turns, trajectories, groups, training samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PolicyVersion = int
"""The number of training iterations behind the weights; 0 is the checkpoint the run began with."""

NO_VERSION: PolicyVersion = -1
"""The version of tokens that no policy generated."""


def _find_oldest(versions: Iterable[PolicyVersion]) -> PolicyVersion:
    """Return the smallest version; 0 if there is none, as unknown weights count as old."""
    return min(versions, default=0)


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingSettings:
    """How a completion is sampled.

    Truncated sampling (top-p, top-k) is omitted on purpose: the trainer could not reproduce its log-probabilities, and
    the importance ratios would be wrong.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        max_new_tokens: The most tokens; fewer where `rollout.max_length` leaves no room for as many.
        stop_token_ids: A completion ends after any of these, which is its last token.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """The policy's answer to one prompt.

    Attributes:
        tokens: The generated token ids, shape [T].
        logprobs: Natural-log probability of each token under the distribution that it was sampled from
            (temperature included), shape [T].
        versions: The version of the weights that each token was sampled from, shape [T]; mixed if the engine was
            updated midway.
        stopped: True if a stop token ended it, False if the length limit did.
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
        """The oldest version among its tokens; 0 if it has none."""
        return _find_oldest(self.versions)


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """One exchange: the prompt and the policy's completion."""

    prompt: Sequence[int]
    completion: Completion


class Ending(StrEnum):
    """Why an episode ended.

    Completed, ill-formed and truncated episodes are trained on with the reward earned until then, truncated ones as
    the algorithm's settings say. Failed ones say nothing about the policy: they have no reward, take no part in their
    group's baseline, and are counted.
    """

    COMPLETED = "completed"
    """The environment said done."""
    ILLEGAL = "illegal_answer"
    """The policy's answer was not a legal action. Penalised."""
    UNPARSABLE_CALL = "unparsable_call"
    """The policy's answer began a tool call that cannot be parsed. Penalised likewise."""
    REFUSED_ACTION = "refused_action"
    """The environment refused the action in the policy's answer. Penalised likewise."""
    TRUNCATED_TURNS = "truncated_turns"
    """The limit on turns, or on steps, was reached."""
    TRUNCATED_ENVIRONMENT = "truncated_environment"
    """The environment ended the episode by a limit of its own."""
    TRUNCATED_LENGTH = "truncated_length"
    """The context had no room for another answer, or an answer was cut and means no action; the latter is penalised."""
    TRUNCATED_TIME = "truncated_time"
    """The time limit was reached."""
    FAILED_POLICY = "failed_policy"
    """No engine answered in any attempt."""
    FAILED_ENVIRONMENT = "failed_environment"
    """The environment failed, or missed its deadline, in every attempt."""
    FAILED_REWARD = "failed_reward"
    """The episode could not be scored."""

    def is_truncated(self) -> bool:
        """Whether a limit, ours or the environment's, ended the episode."""
        return self.name.startswith("TRUNCATED_")

    def is_failure(self) -> bool:
        """Whether something other than the policy ended the episode, so that it cannot be trained on."""
        return self in (Ending.FAILED_POLICY, Ending.FAILED_ENVIRONMENT, Ending.FAILED_REWARD)


@dataclass(kw_only=True, slots=True, frozen=True)
class TurnSummary:
    """What is known of a trajectory's turns where their tokens are not.

    Attributes:
        turns: The number of turns.
        tokens: The number of tokens that the policy produced.
        version: The oldest version among them; 0 if there are none.
        stopped: Whether a stop token ended the last answer.
        lease: The lease under which the tokens were handed to the trainer; None if nobody keeps them.
        sibling: The trajectory's number in its group, which together with the lease is the key of its tokens.
    """

    turns: int
    tokens: int
    version: PolicyVersion
    stopped: bool
    lease: int | None = None
    sibling: int = 0


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One episode from the policy's side.

    A rollout worker hands the tokens to the trainer, and its trajectories have a summary of their turns instead.

    Attributes:
        turns: The exchanges with their tokens; empty if `summary` stands for them.
        reward: Sum of the environment's rewards and of any penalty.
        tool_calls: Number of tool calls sent to the environment.
        refusal: Why the environment refused the last action; None if it did not.
        scores: Scores of the parts of the environment's rubric, by path, summed over the steps.
        seat: The seat that it was played in, if the policy plays several seats of a game; siblings are then compared
            with those of their seat.
        others: What the session's other seats have earned together, in a game that no seat has left; None for an
            episode without any.
    """

    seed: int
    turns: list[Turn] = field(default_factory=list)
    ending: Ending
    reward: float
    tool_calls: int = 0
    refusal: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    seat: str = ""
    others: float | None = None
    summary: TurnSummary | None = None

    def summarize(self) -> TurnSummary:
        """Return the summary of its turns, counted if it has none yet."""
        if self.summary is not None:
            return self.summary
        answers = [turn.completion for turn in self.turns]
        return TurnSummary(
            turns=len(answers),
            tokens=sum(len(answer.tokens) for answer in answers),
            version=_find_oldest(version for answer in answers for version in answer.versions),
            stopped=bool(answers) and answers[-1].stopped,
        )

    def without_tokens(self, *, lease: int | None = None, sibling: int = 0) -> Self:
        """Return the trajectory with a summary of its turns in their place; for the arguments see `TurnSummary`."""
        return replace(self, turns=[], summary=replace(self.summarize(), lease=lease, sibling=sibling))

    @property
    def version(self) -> PolicyVersion:
        """The oldest version among its tokens; 0 if it has none."""
        return self.summarize().version


@dataclass(kw_only=True, slots=True)
class Group:
    """Siblings: trajectories from one seed, whose rewards can be compared.

    Attributes:
        id: Its number in the run, counted from 0.
        environment: The name of its environment in the run's configuration.
        opponent: The version of the policy that played the frozen seats when it began; None without such seats.
    """

    id: int = 0
    seed: int
    environment: str = ""
    opponent: PolicyVersion | None = None
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """The siblings' own rewards, without what the algorithm adds to them for training, shape [G]."""
        return [trajectory.reward for trajectory in self.trajectories]

    def indices_by_seat(self) -> list[list[int]]:
        """Return the indices of the siblings of each seat, which share a baseline; of all, if seats play no part."""
        indices: dict[str, list[int]] = {}
        for index, trajectory in enumerate(self.trajectories):
            indices.setdefault(trajectory.seat, []).append(index)
        return list(indices.values())

    @property
    def version(self) -> PolicyVersion:
        """The oldest version among the group's tokens; 0 if it has none."""
        summaries = (trajectory.summarize() for trajectory in self.trajectories)
        return _find_oldest(summary.version for summary in summaries if summary.tokens)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainSample:
    """One row for the trainer.

    Attributes:
        tokens: Prompt and completion tokens, shape [L].
        loss_mask: True where the policy itself produced the token, shape [L].
        logprobs: Behaviour log-probabilities at those tokens, 0 elsewhere, shape [L].
        versions: The weights that those tokens were sampled from, `NO_VERSION` elsewhere, shape [L].
        advantage: The trajectory's advantage, shared by its tokens.
        trajectory: Index of the row's trajectory in the batch; a trajectory can have several rows.
        group: Index of the trajectory's group in the batch.
        reward: The reward that the trajectory is trained with, credited to its last token.
    """

    tokens: "Sequence[int] | NDArray[np.int32]"
    loss_mask: "Sequence[bool] | NDArray[np.bool_]"
    logprobs: "Sequence[float] | NDArray[np.float32]"
    versions: "Sequence[PolicyVersion] | NDArray[np.int32]"
    advantage: float
    trajectory: int
    group: int = 0
    reward: float = 0.0

    @property
    def version(self) -> PolicyVersion:
        """The oldest version among its tokens; 0 if no policy generated any."""
        return _find_oldest(version for version in self.versions if version != NO_VERSION)
