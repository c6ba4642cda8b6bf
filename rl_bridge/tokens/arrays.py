"""A trajectory's tokens as arrays: what a rollout worker hands to the trainer in place of its turns."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_bridge.tokens.conversation import join_turns
from rl_bridge.types import NO_VERSION, TrainSample, Turn

TokenKey: TypeAlias = tuple[int, int]
"""The lease under which a trajectory was played, and its number among the siblings."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TurnSpan:
    """One turn's place in a row.

    Attributes:
        row: The row's index.
        new: The position of the first token of the prompt that was not in the row before.
        begin: The position of the answer's first token.
        end: The position after its last token.
        stopped: Whether a stop token ended the answer.
    """

    row: int
    new: int
    begin: int
    end: int
    stopped: bool


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenRow:
    """One row of a trajectory.

    Attributes:
        tokens: Token ids, shape [L].
        versions: The weights that sampled each token, `NO_VERSION` for a prompt's tokens, shape [L].
        logprobs: Behaviour log-probabilities, 0 for a prompt's tokens, shape [L].
    """

    tokens: NDArray[np.int32]
    versions: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryTokens:
    """The tokens of a trajectory's turns, joined into rows as by `join_turns`.

    A run is consecutive tokens of one row, of one origin and version. A turn is two runs, its prompt's and its answer's
    (more if the weights changed midway); `NO_VERSION` is the version of a prompt's run.

    Attributes:
        tokens: Token ids of all rows, one after the other, shape [L].
        logprobs: Behaviour log-probabilities of the policy's tokens alone, shape [T].
        runs: The length and the version of each run, shape [N, 2].
        turns: The row of each turn, the bounds of its answer in it, and whether a stop token ended it, shape [K, 4].
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    runs: NDArray[np.int32]
    turns: NDArray[np.int32]

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Self:
        """Lay turns out as arrays."""
        rows, spans = join_turns(turns), list[tuple[int, int, int, bool]]()
        for index, row in enumerate(rows):
            for begin, end in row.answers:
                spans.append((index, begin, end, turns[len(spans)].completion.stopped))
        versions = np.asarray([version for row in rows for version in row.versions], dtype=np.int32)
        logprobs = np.asarray([logprob for row in rows for logprob in row.logprobs], dtype=np.float32)
        starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
        bounds = np.unique(np.concatenate([starts, np.flatnonzero(np.diff(versions)) + 1]))
        return cls(
            tokens=np.asarray([token for row in rows for token in row.tokens], dtype=np.int32),
            logprobs=logprobs[versions != NO_VERSION],
            runs=np.stack([np.diff(bounds), versions[bounds[:-1]]], axis=1).astype(np.int32),
            turns=np.asarray(spans, dtype=np.int32).reshape(-1, 4),
        )

    def iterate_rows(self) -> Iterator[TokenRow]:
        """Yield the rows."""
        versions = np.repeat(self.runs[:, 1], self.runs[:, 0])
        logprobs = np.zeros(len(versions), dtype=np.float32)
        logprobs[versions != NO_VERSION] = self.logprobs
        last_turns = np.flatnonzero(
            np.diff(self.turns[:, 0], append=-1)
        )  # a row ends with its last turn's answer
        ends = np.cumsum(self.turns[last_turns, 2])
        for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False):
            yield TokenRow(
                tokens=self.tokens[begin:end], versions=versions[begin:end], logprobs=logprobs[begin:end]
            )

    def iterate_turns(self) -> Iterator[TurnSpan]:
        """Yield the turns' places in the rows."""
        previous_row, known = -1, 0
        for row, begin, end, stopped in self.turns.tolist():
            yield TurnSpan(
                row=row, new=known if row == previous_row else 0, begin=begin, end=end, stopped=bool(stopped)
            )
            previous_row, known = row, end

    def samples(self, *, advantage: float, index: int, group: int, reward: float) -> list[TrainSample]:
        """Return the rows as training samples, as `training_rows` does of turns."""
        return [
            TrainSample(
                tokens=row.tokens,
                loss_mask=row.versions != NO_VERSION,
                logprobs=row.logprobs,
                versions=row.versions,
                advantage=advantage,
                trajectory=index,
                group=group,
                reward=reward,
            )
            for row in self.iterate_rows()
        ]


_FIELDS: Final = ("tokens", "logprobs", "runs", "turns")


def dump_tokens(trajectories: Mapping[TokenKey, TrajectoryTokens]) -> bytes:
    """Write the tokens of trajectories for a checkpoint, in NumPy's format."""
    file, tokens = io.BytesIO(), list(trajectories.values())
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in tokens]) for name in _FIELDS if tokens
    }
    arrays["lengths"] = np.asarray([[len(getattr(one, name)) for name in _FIELDS] for one in tokens])
    np.savez(file, keys=np.asarray(list(trajectories)), **arrays)
    return file.getvalue()


def load_tokens(content: bytes) -> dict[TokenKey, TrajectoryTokens]:
    """Read the output of `dump_tokens`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        keys = [(int(lease), int(sibling)) for lease, sibling in file["keys"]]
        if not keys:
            return {}
        bounds = np.cumsum(file["lengths"], axis=0)[:-1].T
        parts = [np.split(file[name], bounds[column]) for column, name in enumerate(_FIELDS)]
    return {
        key: TrajectoryTokens(**dict(zip(_FIELDS, arrays, strict=True)))
        for key, arrays in zip(keys, zip(*parts, strict=True), strict=True)
    }
