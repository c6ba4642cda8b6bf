"""From groups and the samples that were made of them to records."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from rl_bridge.records.record import LeftOut, TrajectoryRecord, TurnRecord
from rl_bridge.records.token_text import TokenText
from rl_bridge.types import Group, TrainSample, Trajectory, Turn

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
