"""One trajectory as it is kept: text and numbers of every token, in one line of JSON."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from rl_bridge.types import Group, PolicyVersion, TrainSample, Trajectory, Turn

VersionRuns: TypeAlias = tuple[tuple[PolicyVersion, int], ...]
TrainedRuns: TypeAlias = tuple[tuple[bool, int], ...]


class RecordPart(BaseModel):
    """A part of a record. What a newer version of this package has written beside it is passed over."""

    model_config = ConfigDict(frozen=True)


class LeftOut(RecordPart):
    """The middle of a text that was too long.

    Attributes:
        at: How many characters of the text stand before it.
        characters: How many were left out.
    """

    at: int
    characters: int


class TurnRecord(RecordPart):
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


class TrajectoryRecord(RecordPart):
    """One trajectory.

    Attributes:
        iteration: Which training iteration took it; the first is 1.
        group: Its group's number in the run.
        sibling: Its place in the group.
        seed: The environment's.
        environment: Its name; empty in a run on one.
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
    environment: str = ""
    ending: str
    reward: float
    advantage: float | None
    version: PolicyVersion
    tool_calls: int
    turns: tuple[TurnRecord, ...]


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are not yet, or never, a character."""
REMEMBERED_TOKENS = 65_536
REMEMBERED_TEXTS = 64
"""Siblings are shown the same first prompt."""


class TokenText:
    """Decodes whole stretches of tokens, and answers token by token.

    Args:
        decode: Token ids to text, special tokens included.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._alone = lru_cache(REMEMBERED_TOKENS)(self._decode_one)
        self._whole = lru_cache(REMEMBERED_TEXTS)(decode)

    def _decode_one(self, token: int) -> str:
        return self._decode((token,))

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of a stretch of tokens."""
        return self._whole(tuple(tokens)) if tokens else ""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """One text a token, shape [T]. A token that completes no character has an empty one."""
        if not tokens:
            return []
        # What a token is on its own says it for nearly all answers, and is remembered.
        alone = [self._alone(token) for token in tokens]
        if "".join(alone) == self._decode(tokens):
            return alone
        return self._in_context(tokens)

    def _in_context(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the text of those before it.

        Only the tokens since the last whole character but one are decoded again: enough for tokenizers that set words
        apart by what stands before them, and linear in the number of tokens.
        """
        pieces: list[str] = []
        begin = read = 0
        before = ""
        for place in range(1, len(tokens) + 1):
            now = self._decode(tokens[begin:place])
            if place < len(tokens) and (len(now) <= len(before) or now.endswith(INCOMPLETE)):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, read = read, place
            before = self._decode(tokens[begin:read])
        return pieces


MAX_CONTEXT = 60_000
"""Characters of a turn's context that are kept; of a longer one the middle is left out."""
DIGITS = 4
"""Of a log-probability: a probability to a hundredth of a percent of itself."""

_T = TypeVar("_T")


def group_records(
    group: Group, rows: Sequence[Sequence[TrainSample]], *, iteration: int, text: TokenText
) -> Iterator[TrajectoryRecord]:
    """The records of a group's trajectories.

    Args:
        group: The siblings.
        rows: The samples that were made of each of them; none of one that was left out of the batch.
        iteration: Which one trained them.
        text: Of the policy's tokens.
    """
    for sibling, (trajectory, own) in enumerate(zip(group.trajectories, rows, strict=True)):
        yield TrajectoryRecord(
            iteration=iteration,
            group=group.id,
            sibling=sibling,
            seed=trajectory.seed,
            environment=group.environment,
            ending=trajectory.ending.value,
            reward=trajectory.reward,
            advantage=next((row.advantage for row in own if any(row.loss_mask)), None),
            version=trajectory.version,
            tool_calls=trajectory.tool_calls,
            turns=tuple(_turns(trajectory, own, text)),
        )


def _turns(trajectory: Trajectory, rows: Sequence[TrainSample], text: TokenText) -> Iterator[TurnRecord]:
    seen: list[int] = []
    marks = trained_marks(trajectory.turns, rows)
    for turn, trained in zip(trajectory.turns, marks, strict=True):
        fresh = not seen or list(turn.prompt[: len(seen)]) != seen
        new = turn.prompt if fresh else turn.prompt[len(seen) :]
        seen = [*turn.prompt, *turn.completion.tokens]
        context, left_out = shortened(text.whole(new))
        answer = turn.completion
        yield TurnRecord(
            fresh=fresh,
            context=context,
            context_tokens=len(new),
            left_out=left_out,
            pieces=tuple(text.pieces(answer.tokens)),
            tokens=tuple(answer.tokens),
            logprobs=tuple(round(value, DIGITS) for value in answer.logprobs),
            versions=runs(answer.versions),
            trained=runs(trained),
            stopped=answer.stopped,
        )


def trained_marks(turns: Sequence[Turn], rows: Sequence[TrainSample]) -> Iterator[list[bool]]:
    """For each turn, which tokens of its answer the loss sees, shape [T].

    It is read off the rows that the trainer gets: whatever masks or drops them is seen here.
    """
    at = read = 0
    for turn in turns:
        begin, end = len(turn.prompt), len(turn.prompt) + len(turn.completion.tokens)
        wanted = [*turn.prompt, *turn.completion.tokens]
        # Behind what has been read of a row there may be more turns; one that begins before that has a row of its own.
        candidates = range(at if begin >= read else at + 1, len(rows))
        found = next((place for place in candidates if list(rows[place].tokens[:end]) == wanted), None)
        if found is None:
            yield [False] * len(turn.completion.tokens)
        else:
            at, read = found, end
            yield list(rows[found].loss_mask[begin:end])


def shortened(text: str, limit: int = MAX_CONTEXT) -> tuple[str, LeftOut | None]:
    """A text without its middle where it is longer than the limit, and what was left out."""
    if len(text) <= limit:
        return text, None
    head, tail = limit // 2, limit - limit // 2
    return text[:head] + text[-tail:], LeftOut(at=head, characters=len(text) - limit)


def runs(values: Iterable[_T]) -> tuple[tuple[_T, int], ...]:
    """Equal neighbours as (value, how many)."""
    return tuple((value, sum(1 for _ in same)) for value, same in groupby(values))
