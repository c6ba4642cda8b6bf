"""Rollouts kept to be read: a bounded, sampled part of what a run was trained on, in its folder."""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from rl_bridge.config.sections import RecordsConfig
from rl_bridge.metrics.sinks import rewind
from rl_bridge.types import Group, PolicyVersion, TrainSample, Trajectory, Turn

VersionRuns: TypeAlias = tuple[tuple[PolicyVersion, int], ...]
TrainedRuns: TypeAlias = tuple[tuple[bool, int], ...]


class RecordPart(BaseModel):
    """A part of a record. What a newer version of this package has written beside it is passed over."""

    model_config = ConfigDict(frozen=True)


class LeftOut(RecordPart):
    """The middle of a text that was too long: so many characters, after so many others."""

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
        scores: What the parts of the environment's rubric gave, by path, summed over the steps.
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
    scores: dict[str, float] = {}
    turns: tuple[TurnRecord, ...]


INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are not yet, or never, a character."""
TOKEN_CACHE_SIZE = 65_536
TEXT_CACHE_SIZE = 64
"""Siblings are shown the same first prompt."""


class TokenDecoder:
    """Decodes whole stretches of tokens, and answers token by token."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._decode_token = lru_cache(TOKEN_CACHE_SIZE)(lambda token: decode((token,)))
        self._decode_cached = lru_cache(TEXT_CACHE_SIZE)(decode)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a stretch of tokens."""
        return self._decode_cached(tuple(tokens)) if tokens else ""

    def split(self, tokens: Sequence[int]) -> list[str]:
        """One text a token, shape [T]. A token that completes no character has an empty one."""
        if not tokens:
            return []
        # What a token is on its own says it for nearly all answers, and is remembered.
        token_texts = [self._decode_token(token) for token in tokens]
        if "".join(token_texts) == self._decode(tokens):
            return token_texts
        return self._split_in_context(tokens)

    def _split_in_context(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the text of those before it.

        Only the tokens since the last whole character but one are decoded again: enough for tokenizers that set words
        apart by what stands before them, and linear in the number of tokens.
        """
        pieces: list[str] = []
        begin = read = 0
        before = ""
        for place in range(1, len(tokens) + 1):
            now = self._decode(tokens[begin:place])
            if place < len(tokens) and (len(now) <= len(before) or now.endswith(INCOMPLETE_CHARACTER)):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, read = read, place
            before = self._decode(tokens[begin:read])
        return pieces


MAX_CONTEXT_CHARS = 60_000
"""Characters of a turn's context that are kept; of a longer one the middle is left out."""
LOGPROB_DIGITS = 4
"""Of a log-probability: a probability to a hundredth of a percent of itself."""

_T = TypeVar("_T")


def make_group_records(
    group: Group, rows: Sequence[Sequence[TrainSample]], *, iteration: int, text: TokenDecoder
) -> Iterator[TrajectoryRecord]:
    """The records of a group's trajectories, with the samples that were made of each; none of one that was left out."""
    for sibling, (trajectory, trajectory_rows) in enumerate(zip(group.trajectories, rows, strict=True)):
        yield TrajectoryRecord(
            iteration=iteration,
            group=group.id,
            sibling=sibling,
            seed=trajectory.seed,
            environment=group.environment,
            ending=trajectory.ending.value,
            reward=trajectory.reward,
            advantage=next((row.advantage for row in trajectory_rows if any(row.loss_mask)), None),
            version=trajectory.version,
            tool_calls=trajectory.tool_calls,
            scores=trajectory.scores,
            turns=tuple(_make_turn_records(trajectory, trajectory_rows, text)),
        )


def _make_turn_records(
    trajectory: Trajectory, rows: Sequence[TrainSample], text: TokenDecoder
) -> Iterator[TurnRecord]:
    previous: list[int] = []
    marks = find_trained_tokens(trajectory.turns, rows)
    for turn, trained in zip(trajectory.turns, marks, strict=True):
        fresh = not previous or list(turn.prompt[: len(previous)]) != previous
        new = turn.prompt if fresh else turn.prompt[len(previous) :]
        previous = [*turn.prompt, *turn.completion.tokens]
        context, left_out = shorten_text(text.decode(new))
        answer = turn.completion
        yield TurnRecord(
            fresh=fresh,
            context=context,
            context_tokens=len(new),
            left_out=left_out,
            pieces=tuple(text.split(answer.tokens)),
            tokens=tuple(answer.tokens),
            logprobs=tuple(round(value, LOGPROB_DIGITS) for value in answer.logprobs),
            versions=encode_runs(answer.versions),
            trained=encode_runs(trained),
            stopped=answer.stopped,
        )


def find_trained_tokens(turns: Sequence[Turn], rows: Sequence[TrainSample]) -> Iterator[list[bool]]:
    """For each turn, which tokens of its answer the loss sees, shape [T].

    It is read off the rows that the trainer gets: whatever masks or drops them is seen here.
    """
    at = read = 0
    for turn in turns:
        begin, end = len(turn.prompt), len(turn.prompt) + len(turn.completion.tokens)
        turn_tokens = [*turn.prompt, *turn.completion.tokens]
        # Behind what has been read of a row there may be more turns; one that begins before that has a row of its own.
        candidates = range(at if begin >= read else at + 1, len(rows))
        index = next((place for place in candidates if list(rows[place].tokens[:end]) == turn_tokens), None)
        if index is None:
            yield [False] * len(turn.completion.tokens)
        else:
            at, read = index, end
            yield list(rows[index].loss_mask[begin:end])


def shorten_text(text: str, limit: int = MAX_CONTEXT_CHARS) -> tuple[str, LeftOut | None]:
    """A text without its middle where it is longer than the limit, and what was left out."""
    if len(text) <= limit:
        return text, None
    head, tail = limit // 2, limit - limit // 2
    return text[:head] + text[-tail:], LeftOut(at=head, characters=len(text) - limit)


def encode_runs(values: Iterable[_T]) -> tuple[tuple[_T, int], ...]:
    """Equal neighbours as (value, how many)."""
    return tuple((value, sum(1 for _ in same)) for value, same in groupby(values))


FOLDER = "rollouts"
"""In a run's folder."""
SEGMENTS = 8
"""Files at most."""


def list_segment_files(run: Path) -> list[Path]:
    """The files in a run's folder, oldest first."""
    numbered = (path for path in (run / FOLDER).glob("*.jsonl") if path.stem.isdecimal())
    return sorted(numbered, key=lambda path: int(path.stem))


class Segments:
    """Appends lines to the files of a run's folder, and keeps them all together within a bound."""

    def __init__(self, run: Path, *, max_bytes: int) -> None:
        self._run = run
        self.segment_bytes = max_bytes // SEGMENTS
        """What one file holds at most."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Append lines, each with its end, that belong together and are within `segment_bytes`."""
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
        """Take out what came after an iteration, and a last line that was cut off."""
        for path in reversed(list_segment_files(self._run)):
            if rewind(path, iteration):
                return
            path.unlink()


def read_lines(run: Path) -> Iterator[bytes]:
    """The lines of all records, oldest first, without the one that is just being written.

    A file that is deleted meanwhile has no lines left.
    """
    for path in list_segment_files(run):
        try:
            with path.open("rb") as file:
                # Not on behind a line without an end: its rest, once it is there, would pass for a line.
                yield from takewhile(lambda line: line.endswith(b"\n"), file)
        except FileNotFoundError:
            continue


logger = logging.getLogger(__name__)


class RolloutRecords:
    """What a run leaves to be read of its rollouts: whole groups, drawn at random, within a bound."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str], records: RecordsConfig) -> None:
        self._text = TokenDecoder(decode)
        self._groups = records.groups
        self._segments = Segments(folder, max_bytes=records.max_mb << 20)
        self._has_warned = False

    def write(
        self, iteration: PolicyVersion, groups: Sequence[Group], samples: Sequence[TrainSample]
    ) -> None:
        """Keep some of the groups of an iteration, with what was made of them. Which ones, its number decides."""
        rows: defaultdict[int, list[TrainSample]] = defaultdict(list)
        for sample in samples:
            rows[sample.trajectory].append(sample)
        kept_places = random.Random(iteration).sample(range(len(groups)), min(self._groups, len(groups)))
        first = 0
        for place, group in enumerate(groups):
            if place in kept_places:
                group_rows = [rows[first + sibling] for sibling in range(len(group.trajectories))]
                self._append_group(iteration, group, group_rows)
            first += len(group.trajectories)

    def _append_group(
        self, iteration: PolicyVersion, group: Group, rows: Sequence[Sequence[TrainSample]]
    ) -> None:
        lines: list[bytes] = []
        size = 0
        for record in make_group_records(group, rows, iteration=iteration, text=self._text):
            lines.append(record.model_dump_json().encode() + b"\n")
            size += len(lines[-1])
            if size > self._segments.segment_bytes:  # the run waits, and no more of it is of use
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
        """Forget what came after an iteration: it is trained again."""
        self._segments.rewind(iteration)
