"""Records of rollouts: a bounded sample of what a run was trained on, written to its folder."""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from rl_bridge.config.sections import RecordsConfig
from rl_bridge.metrics.sinks import rewind
from rl_bridge.types import Group, PolicyVersion

if TYPE_CHECKING:
    # These import NumPy, which readers of records do not need.
    from rl_bridge.tokens.arrays import TokenRow, TrajectoryTokens, TurnSpan

VersionRuns: TypeAlias = tuple[tuple[PolicyVersion, int], ...]
TrainedRuns: TypeAlias = tuple[tuple[bool, int], ...]


class RecordPart(BaseModel):
    """A part of a record. Unknown keys, written by a newer version of this package, are ignored."""

    model_config = ConfigDict(frozen=True)


class LeftOut(RecordPart):
    """The omitted middle of a text that was too long.

    Attributes:
        at: Number of characters before it.
        characters: Number of characters omitted.
    """

    at: int
    characters: int


class TurnRecord(RecordPart):
    """One exchange.

    Attributes:
        fresh: The prompt does not continue the previous turn's tokens, so a training sample begins here.
        context: The new part of the prompt, which the sample did not contain yet, with special tokens.
        context_tokens: Its number of tokens.
        left_out: The omitted middle of `context`; None if it is complete.
        pieces: The text of each token of the policy's answer, shape [T]; joined they are the answer. A token that
            ends within a character has "", and the one that completes it has the character.
        tokens: Their ids, shape [T].
        logprobs: Natural-log probability of each under the distribution that it was sampled from, shape [T].
        versions: The weights that sampled them, run-length encoded as (version, number of tokens).
        trained: Whether the loss saw them, run-length encoded as (trained, number of tokens).
        stopped: True if a stop token ended the answer, False if the length limit did.
        parent: The index of the turn whose answer the prompt continues, as far as its tokens go; None if it continues
            none.
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
    parent: int | None = None


class TrajectoryRecord(RecordPart):
    """One trajectory.

    Attributes:
        iteration: The training iteration that used it; the first is 1.
        group: Its group's number in the run.
        sibling: Its index in the group.
        seed: The environment's seed.
        environment: The environment's name; empty in a run with a single environment.
        seat: The seat that it was played in, in self-play.
        ending: Why it ended; a value of `rl_bridge.types.Ending`.
        reward: The episode's reward, without any length penalty, which only the advantage includes.
        advantage: The advantage of its tokens; None if none of them was trained.
        version: The oldest weights that any of its tokens came from.
        tool_calls: Number of tool calls.
        scores: Scores of the parts of the environment's rubric, by path, summed over the steps.
        turns: The exchanges.
    """

    iteration: int
    group: int
    sibling: int
    seed: int
    environment: str = ""
    seat: str = ""
    ending: str
    reward: float
    advantage: float | None
    version: PolicyVersion
    tool_calls: int
    scores: dict[str, float] = {}
    turns: tuple[TurnRecord, ...]


INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes incomplete or invalid UTF-8 to."""
TOKEN_CACHE_SIZE = 65_536
TEXT_CACHE_SIZE = 64
"""Texts, cached because siblings share their first prompt."""


class TokenDecoder:
    """Decodes token sequences, whole or token by token."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._decode_token = lru_cache(TOKEN_CACHE_SIZE)(lambda token: decode((token,)))
        self._decode_cached = lru_cache(TEXT_CACHE_SIZE)(decode)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a token sequence."""
        return self._decode_cached(tuple(tokens)) if tokens else ""

    def split(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, shape [T]; "" for a token that completes no character."""
        if not tokens:
            return []
        # For nearly all answers, tokens decoded one by one, which is cached, give the same text.
        token_texts = [self._decode_token(token) for token in tokens]
        if "".join(token_texts) == self._decode(tokens):
            return token_texts
        return self._split_in_context(tokens)

    def _split_in_context(self, tokens: Sequence[int]) -> list[str]:
        """Return what each token adds to the text of those before it.

        Only the tokens since the last complete character but one are decoded again: enough for tokenizers that
        separate words by what precedes them, and linear in the number of tokens.
        """
        pieces: list[str] = []
        begin = read = 0
        previous_text = ""
        for index in range(1, len(tokens) + 1):
            decoded = self._decode(tokens[begin:index])
            if index < len(tokens) and (
                len(decoded) <= len(previous_text) or decoded.endswith(INCOMPLETE_CHARACTER)
            ):
                pieces.append("")
                continue
            pieces.append(decoded[len(previous_text) :])
            begin, read = read, index
            previous_text = self._decode(tokens[begin:read])
        return pieces


MAX_CONTEXT_CHARS = 60_000
"""Characters kept of a turn's context; the middle of a longer one is omitted."""
LOGPROB_DIGITS = 4
"""Decimals kept of a log-probability, which give the probability to 0.01 % of itself."""

_T = TypeVar("_T")


def make_group_records(
    group: Group,
    tokens: "Sequence[TrajectoryTokens]",
    advantages: Sequence[float | None],
    *,
    iteration: int,
    text: TokenDecoder,
) -> Iterator[TrajectoryRecord]:
    """Yield a record of each of a group's trajectories, given their advantages (None if one was not trained)."""
    parts = zip(group.trajectories, tokens, advantages, strict=True)
    for sibling, (trajectory, trajectory_tokens, advantage) in enumerate(parts):
        yield TrajectoryRecord(
            iteration=iteration,
            group=group.id,
            sibling=sibling,
            seed=trajectory.seed,
            environment=group.environment,
            seat=trajectory.seat,
            ending=trajectory.ending.value,
            reward=trajectory.reward,
            advantage=advantage,
            version=trajectory.version,
            tool_calls=trajectory.tool_calls,
            scores=trajectory.scores,
            turns=tuple(_make_turn_records(trajectory_tokens, trained=advantage is not None, text=text)),
        )


def _make_turn_records(
    tokens: "TrajectoryTokens", *, trained: bool, text: TokenDecoder
) -> Iterator[TurnRecord]:
    rows, turns = list(tokens.iterate_rows()), list(tokens.iterate_turns())
    for place, turn in enumerate(turns):
        row, answer = rows[turn.row], slice(turn.begin, turn.end)
        new, answer_tokens = row.tokens[turn.new : turn.begin].tolist(), row.tokens[answer].tolist()
        context, left_out = shorten_text(text.decode(new))
        yield TurnRecord(
            fresh=turn.new == 0,
            context=context,
            context_tokens=len(new),
            left_out=left_out,
            pieces=tuple(text.split(answer_tokens)),
            tokens=tuple(answer_tokens),
            logprobs=tuple(round(value, LOGPROB_DIGITS) for value in row.logprobs[answer].tolist()),
            versions=encode_runs(row.versions[answer].tolist()),
            trained=encode_runs([trained] * len(answer_tokens)),
            stopped=turn.stopped,
            parent=_find_parent(place, turns, rows),
        )


def _find_parent(place: int, turns: "Sequence[TurnSpan]", rows: "Sequence[TokenRow]") -> int | None:
    """Return the latest turn before this one whose tokens, answer included, its prompt begins with."""
    turn = turns[place]
    if turn.new:
        return place - 1
    prompt = rows[turn.row].tokens[: turn.begin]
    known = [
        (other.end, index)
        for index, other in enumerate(turns[:place])
        if other.end <= turn.begin
        and bool((rows[other.row].tokens[: other.end] == prompt[: other.end]).all())
    ]
    return max(known)[1] if known else None


def shorten_text(text: str, limit: int = MAX_CONTEXT_CHARS) -> tuple[str, LeftOut | None]:
    """Return a text without its middle if it is longer than `limit`, and what was omitted."""
    if len(text) <= limit:
        return text, None
    head, tail = limit // 2, limit - limit // 2
    return text[:head] + text[-tail:], LeftOut(at=head, characters=len(text) - limit)


def encode_runs(values: Iterable[_T]) -> tuple[tuple[_T, int], ...]:
    """Run-length encode values as (value, count)."""
    return tuple((value, sum(1 for _ in same)) for value, same in groupby(values))


FOLDER = "rollouts"
"""The records' folder in a run's folder."""
SEGMENTS = 8
"""The most files of records."""


def list_segment_files(run: Path) -> list[Path]:
    """Return the files of records in a run's folder, oldest first."""
    numbered = (path for path in (run / FOLDER).glob("*.jsonl") if path.stem.isdecimal())
    return sorted(numbered, key=lambda path: int(path.stem))


class Segments:
    """Appends lines to the files of records in a run's folder, and keeps their total size within a bound."""

    def __init__(self, run: Path, *, max_bytes: int) -> None:
        self._run = run
        self.segment_bytes = max_bytes // SEGMENTS
        """The most bytes of one file."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Append newline-terminated lines to one file; together they must be within `segment_bytes`."""
        size = sum(map(len, lines))
        files = list_segment_files(self._run)
        if not files or files[-1].stat().st_size + size > self.segment_bytes:
            (self._run / FOLDER).mkdir(exist_ok=True)
            number = int(files[-1].stem) + 1 if files else 1
            files.append(self._run / FOLDER / f"{number:06d}.jsonl")
        with files[-1].open("ab") as file:
            file.writelines(lines)
        for old in files[1 : 1 + max(0, len(files) - SEGMENTS)]:
            old.unlink(missing_ok=True)

    def rewind(self, iteration: int) -> None:
        """Remove what came after an iteration, and a truncated last line."""
        for path in reversed(list_segment_files(self._run)):
            if rewind(path, iteration):
                return
            path.unlink()


def read_lines(run: Path) -> Iterator[bytes]:
    """Yield the lines of all records, oldest first, except one that is still being written.

    A file that is deleted meanwhile is skipped.
    """
    for path in list_segment_files(run):
        try:
            with path.open("rb") as file:
                # Stop at a line without its newline: the rest of it, once written, would be taken for a line.
                yield from takewhile(lambda line: line.endswith(b"\n"), file)
        except FileNotFoundError:
            continue


logger = logging.getLogger(__name__)


class RolloutRecords:
    """Writes randomly sampled whole groups of a run's rollouts to its folder, within a size bound."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str], records: RecordsConfig) -> None:
        self._text = TokenDecoder(decode)
        self._groups = records.groups
        self._segments = Segments(folder, max_bytes=records.max_mb << 20)
        self._has_warned = False

    def choose(self, iteration: PolicyVersion, groups: Sequence[Group]) -> dict[int, Group]:
        """Choose the groups of an iteration to record, by the index of their first trajectory; it seeds the choice."""
        chosen = random.Random(iteration).sample(range(len(groups)), min(self._groups, len(groups)))
        firsts = accumulate((len(group.trajectories) for group in groups), initial=0)
        return {
            first: group
            for index, (first, group) in enumerate(zip(firsts, groups, strict=False))
            if index in chosen
        }

    def write(
        self,
        iteration: PolicyVersion,
        groups: Mapping[int, Group],
        tokens: "Sequence[TrajectoryTokens]",
        advantages: Mapping[int, float],
    ) -> None:
        """Record groups.

        Args:
            iteration: The iteration that trained them.
            groups: What `choose` returned.
            tokens: The tokens of all their trajectories, in order.
            advantages: The advantages of the trained trajectories of the iteration, by their indices.
        """
        remaining = iter(tokens)
        for first, group in groups.items():
            size = len(group.trajectories)
            group_advantages = [advantages.get(index) for index in range(first, first + size)]
            self._append_group(iteration, group, list(islice(remaining, size)), group_advantages)

    def _append_group(
        self,
        iteration: PolicyVersion,
        group: Group,
        tokens: "Sequence[TrajectoryTokens]",
        advantages: Sequence[float | None],
    ) -> None:
        lines: list[bytes] = []
        size = 0
        for record in make_group_records(group, tokens, advantages, iteration=iteration, text=self._text):
            lines.append(record.model_dump_json().encode() + b"\n")
            size += len(lines[-1])
            if size > self._segments.segment_bytes:  # the run waits, and the group cannot fit
                self._warn(group, trajectories=len(lines))
                return
        self._segments.append(lines)

    def _warn(self, group: Group, *, trajectories: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%d of the %d rollouts of group %d take more than the %.1f MB that fit; such groups are not kept; "
            "raise records.max_mb",
            trajectories,
            len(group.trajectories),
            group.id,
            self._segments.segment_bytes / 2**20,
        )

    def rewind(self, iteration: PolicyVersion) -> None:
        """Remove the records after an iteration, which is trained again."""
        self._segments.rewind(iteration)
