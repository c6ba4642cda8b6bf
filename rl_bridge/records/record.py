"""One trajectory as it is kept: text and numbers of every token, in one line of JSON that needs no tokenizer."""

from typing import TypeAlias

from pydantic import BaseModel, ConfigDict

from rl_bridge.types import PolicyVersion

VersionRuns: TypeAlias = tuple[tuple[PolicyVersion, int], ...]
TrainedRuns: TypeAlias = tuple[tuple[bool, int], ...]


class Kept(BaseModel):
    """A part of a record. What a newer version of this package has written beside it is passed over."""

    model_config = ConfigDict(frozen=True)


class LeftOut(Kept):
    """The middle of a text that was too long.

    Attributes:
        at: How many characters of the text stand before it.
        characters: How many were left out.
    """

    at: int
    characters: int


class TurnRecord(Kept):
    """One exchange.

    Attributes:
        fresh: The prompt does not continue the tokens before it, so that a training sample begins here.
        context: What the policy was shown and had not seen in this sample, with special tokens.
        context_tokens: How many tokens that is.
        left_out: What is missing in the middle of `context`; None where nothing is.
        pieces: The text of each token that the policy answered with, shape [T]; joined they are the answer. A token
            that ends within a character has "", and the one that completes it has the character.
        tokens: Their ids, shape [T].
        logprobs: Natural-log probability of each under the distribution that it was sampled from, shape [T].
        versions: The weights that sampled them: (version, number of tokens) one after the other.
        trained: Whether the loss saw them: (trained or masked, number of tokens) one after the other.
        stopped: True where a stop token ended the answer, False where the length limit did.
    """

    fresh: bool
    context: str
    context_tokens: int
    left_out: LeftOut | None = None
    pieces: tuple[str, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: VersionRuns
    trained: TrainedRuns
    stopped: bool


class TrajectoryRecord(Kept):
    """One trajectory.

    Attributes:
        iteration: Which training iteration took it; the first is 1.
        group: Its group's number in the run.
        sibling: Its place in the group.
        seed: The environment's.
        ending: Why it ended; a value of `rl_bridge.types.Ending`.
        reward: What the episode earned. Where length costs something, the advantage has it.
        advantage: Of its tokens; None where none of them was trained.
        version: The oldest weights that any of its tokens came from.
        tool_calls: How many tools it called.
        turns: The exchanges.
    """

    iteration: int
    group: int
    sibling: int
    seed: int
    ending: str
    reward: float
    advantage: float | None
    version: PolicyVersion
    tool_calls: int
    turns: tuple[TurnRecord, ...]
