"""Training samples as arrays, several documents in one row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rl_bridge.types import TrainSample

NO_ROOM = -1
"""The row of a document that did not fit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Packing:
    """Where each document lies.

    Attributes:
        row: Shape [U]; `NO_ROOM` where there was none.
        offset: The column of its first token, shape [U].
        rows: How many rows there are, B.
        length: Columns of every row, L: the longest document.
    """

    row: NDArray[np.int64]
    offset: NDArray[np.int64]
    rows: int
    length: int


def pack(lengths: NDArray[np.int64], *, most_rows: int | None = None) -> Packing:
    """Put documents into rows that are as long as the longest of them, the longest first, each where it fits first.

    Rows never become longer than one row a document would be, so packing costs no attention over longer rows;
    there are only fewer of them. First fit decreasing takes at most 11/9 of the fewest rows, and 6/9 of one more
    (Dósa, 2007).

    Args:
        lengths: Tokens of each document, shape [U], at least one document.
        most_rows: Rows at most; what does not fit stays outside. The documents that did fit, packed again without the
            others, come to lie in the same places.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    length = int(descending[0])
    limit = len(lengths) if most_rows is None else min(most_rows, len(lengths))
    row = np.full(len(lengths), NO_ROOM, dtype=np.int64)
    offset = np.zeros(len(lengths), dtype=np.int64)
    free = np.full(limit, length, dtype=np.int64)
    opened = place = 0
    while place < len(order):
        document, tokens = order[place], descending[place]
        visible = free[: opened + 1]  # with the next fresh row, where there may be one
        first = int(np.argmax(visible >= tokens))
        if visible[first] < tokens:  # on to the longest document that is short enough for what is left
            place = int(np.searchsorted(-descending, -free.max()))
            continue
        opened = max(opened, first + 1)
        row[document], offset[document] = first, length - free[first]
        free[first] -= tokens
        place += 1
    return Packing(row=row, offset=offset, rows=opened, length=length)


N = TypeVar("N", bound=np.generic)

PAD = 0
"""Fills contexts on the right. Attention is causal, so it is never looked at."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainBatch:
    """Contexts, and the loss tokens that hang from them.

    Attributes:
        contexts: Token ids, right-padded, shape [U, L].
        lengths: Tokens of each context, shape [U].
        context: Which context each loss token belongs to, shape [T].
        position: The place in the context whose logits predict the loss token, shape [T].
        target: The loss token, shape [T].
        old_logprobs: Its behaviour log-probability, shape [T].
        versions: The weights that it was sampled from, shape [T].
        advantages: Shape [T].
        trajectory: Which trajectory it belongs to, shape [T]. Its tokens are in the order in which they were sampled.
        group: Which group the trajectory belongs to, shape [T].
        rewards: What it earned at once, shape [T]: the trajectory's reward at the last of its tokens, 0 before.
        reference_logprobs: Its log-probability under the reference policy, shape [T]; None without one.
        proximal_logprobs: Its log-probability under the trainer's weights before the first update on the batch, shape
            [T]; None where nobody asks for them.
        values: What the critic said of the state before it, likewise; None without a critic.
        returns: What the critic should have said, shape [T]; None without a critic.
    """

    contexts: NDArray[np.int32]
    lengths: NDArray[np.int64]
    context: NDArray[np.int64]
    position: NDArray[np.int64]
    target: NDArray[np.int64]
    old_logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    advantages: NDArray[np.float32]
    trajectory: NDArray[np.int64]
    group: NDArray[np.int64]
    rewards: NDArray[np.float32]
    reference_logprobs: NDArray[np.float32] | None = None
    proximal_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None

    @classmethod
    def from_samples(cls, samples: Sequence[TrainSample]) -> Self:
        """Lay samples out as arrays.

        Raises:
            ValueError: A loss token has nothing before it, or there is no loss token at all.
        """
        numbers: dict[bytes, int] = {}
        contexts: list[NDArray[np.int64]] = []
        parts: list[_Part] = []
        ends: dict[int, tuple[int, float]] = {}
        count = 0
        for sample in samples:
            places = np.flatnonzero(np.asarray(sample.loss_mask, dtype=np.bool_))
            if not places.size:
                continue
            if places[0] == 0:
                raise ValueError(
                    "expected every loss token to follow a prompt, got a row that begins with one"
                )
            tokens = np.asarray(sample.tokens, dtype=np.int64)
            before = tokens[: places[-1]]
            number = numbers.setdefault(before.tobytes(), len(numbers))
            if number == len(contexts):
                contexts.append(before)
            parts.append(_Part(sample=sample, context=number, places=places, targets=tokens[places]))
            count += len(places)
            ends[sample.trajectory] = (count - 1, sample.reward)
        if not contexts:
            raise ValueError("expected at least one loss token in a batch, got none")
        lengths = np.asarray([len(tokens) for tokens in contexts], dtype=np.int64)
        padded = np.full((len(contexts), lengths.max()), PAD, dtype=np.int32)
        for number, tokens in enumerate(contexts):
            padded[number, : len(tokens)] = tokens
        rewards = np.zeros(count, dtype=np.float32)
        for last, reward in ends.values():
            rewards[last] = reward
        counts = [len(part.places) for part in parts]
        return cls(
            contexts=padded,
            lengths=lengths,
            context=np.repeat(np.asarray([part.context for part in parts], dtype=np.int64), counts),
            position=np.concatenate([part.places for part in parts]) - 1,
            target=np.concatenate([part.targets for part in parts]),
            old_logprobs=np.concatenate([part.of(part.sample.logprobs, np.float32) for part in parts]),
            versions=np.concatenate([part.of(part.sample.versions, np.int64) for part in parts]),
            advantages=np.repeat(
                np.asarray([part.sample.advantage for part in parts], dtype=np.float32), counts
            ),
            trajectory=np.repeat(
                np.asarray([part.sample.trajectory for part in parts], dtype=np.int64), counts
            ),
            group=np.repeat(np.asarray([part.sample.group for part in parts], dtype=np.int64), counts),
            rewards=rewards,
        )

    def __len__(self) -> int:
        """How many loss tokens there are."""
        return len(self.target)

    def with_reference(self, logprobs: NDArray[np.float32]) -> Self:
        """The same batch with the reference policy's log-probabilities, shape [T]."""
        return replace(self, reference_logprobs=logprobs)

    def take(self, tokens: NDArray[np.int64]) -> Self:
        """The part of the batch that holds the given loss tokens, with only the contexts they need.

        Args:
            tokens: Indices of loss tokens.
        """
        used, context = np.unique(self.context[tokens], return_inverse=True)
        lengths = self.lengths[used]
        return type(self)(
            contexts=self.contexts[used, : lengths.max()],
            lengths=lengths,
            context=context.astype(np.int64),
            position=self.position[tokens],
            target=self.target[tokens],
            old_logprobs=self.old_logprobs[tokens],
            versions=self.versions[tokens],
            advantages=self.advantages[tokens],
            trajectory=self.trajectory[tokens],
            group=self.group[tokens],
            rewards=self.rewards[tokens],
            reference_logprobs=_of(self.reference_logprobs, tokens),
            proximal_logprobs=_of(self.proximal_logprobs, tokens),
            values=_of(self.values, tokens),
            returns=_of(self.returns, tokens),
        )

    def split_by_trajectory(self, parts: int, generator: np.random.Generator) -> list[Self]:
        """Shuffle trajectories into parts of nearly equal number; parts that would be empty are left out."""
        if parts == 1:
            return [self]
        order = generator.permutation(np.unique(self.trajectory))
        chunks = (np.isin(self.trajectory, chunk) for chunk in np.array_split(order, parts) if len(chunk))
        return [self.take(np.flatnonzero(chosen)) for chosen in chunks]

    def micro_batches(self, rows: int) -> Iterator[tuple[Self, NDArray[np.int64]]]:
        """Parts that pack into at most `rows` rows, each with the indices of its loss tokens in this batch.

        Long contexts come first, among their like: a row is as long as its part's longest context.
        """
        part = np.full(len(self.lengths), NO_ROOM, dtype=np.int64)
        waiting = np.arange(len(self.lengths))
        parts = 0
        while len(waiting):
            outside = pack(self.lengths[waiting], most_rows=rows).row == NO_ROOM
            part[waiting[~outside]] = parts
            waiting = waiting[outside]
            parts += 1
        of_token = part[self.context]
        order = np.argsort(of_token, kind="stable")
        for chosen in np.split(order, np.searchsorted(of_token[order], np.arange(1, parts))):
            yield self.take(chosen), chosen

    def packed(self, *, multiple_of: int = 1) -> "PackedRows":
        """The contexts laid out for one forward pass.

        Args:
            multiple_of: Rows are padded to a multiple of this length.
        """
        packing = pack(self.lengths)
        length = -(-packing.length // multiple_of) * multiple_of
        tokens = np.full((packing.rows, length), PAD, dtype=np.int64)
        positions = np.zeros((packing.rows, length), dtype=np.int64)
        document = np.full((packing.rows, length), NO_DOCUMENT, dtype=np.int64)
        owner = np.repeat(np.arange(len(self.lengths)), self.lengths)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        place = (packing.row[owner], packing.offset[owner] + within)
        tokens[place] = self.contexts[owner, within]
        positions[place] = within
        document[place] = owner
        return PackedRows(
            tokens=tokens,
            positions=positions,
            document=document,
            row=packing.row[self.context],
            column=packing.offset[self.context] + self.position,
            target=self.target,
            one_a_row=packing.rows == len(self.lengths),
        )


def _of(values: NDArray[np.float32] | None, tokens: NDArray[np.int64]) -> NDArray[np.float32] | None:
    return None if values is None else values[tokens]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Part:
    """The loss tokens of one sample: their places in it, and what stands there."""

    sample: TrainSample
    context: int
    places: NDArray[np.int64]
    targets: NDArray[np.int64]

    def of(self, values: Sequence[float], dtype: type[N]) -> NDArray[N]:
        return np.asarray(values, dtype=dtype)[self.places]


NO_DOCUMENT = -1


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedRows:
    """What goes through the model in one pass.

    Attributes:
        tokens: Shape [B, L].
        positions: Of each token in its document, shape [B, L].
        document: Which context each token belongs to, shape [B, L]; `NO_DOCUMENT` for padding.
        row: Where the hidden state is from which each loss token is predicted, shape [T].
        column: Likewise, shape [T].
        target: The loss tokens, shape [T].
        one_a_row: True where no row holds two documents, so that causal attention keeps them apart already.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    document: NDArray[np.int64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    target: NDArray[np.int64]
    one_a_row: bool
