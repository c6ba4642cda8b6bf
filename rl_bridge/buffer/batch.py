"""Training samples as arrays, packed into rows and divided into passes within a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rl_bridge.buffer.forest import KeyBlocks, block_length, find_keys, lay_out, sort_by_prefix
from rl_bridge.errors import ConfigError
from rl_bridge.types import TrainSample


def pack(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Pack documents by first fit decreasing into rows as long as the longest document.

    Rows are no longer than with one document per row, so packing adds no attention over longer rows; there are only
    fewer rows. First fit decreasing takes at most 11/9 of the fewest possible rows, plus 6/9 (Dósa, 2007).

    Args:
        lengths: The number of tokens of each document, shape [U], at least one document.

    Returns:
        Each document's row and the column of its first token, each of shape [U]; and the number of rows, B.
    """
    order = np.argsort(-lengths, kind="stable")
    length = int(lengths[order[0]])
    row, offset = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    free_columns = np.full(len(lengths), length, dtype=np.int64)
    row_count = 0
    for document in order:
        row_index = int(
            np.argmax(free_columns[: row_count + 1] >= lengths[document])
        )  # with the next fresh row
        row_count = max(row_count, row_index + 1)
        row[document], offset[document] = row_index, length - free_columns[row_index]
        free_columns[row_index] -= lengths[document]
    return row, offset, row_count


def divide_documents(
    lengths: NDArray[np.int64], *, costs: NDArray[np.float64], ranks: int, budget: int, min_passes: int = 1
) -> list[list[NDArray[np.int64]]]:
    """Divide documents into passes within a token budget, the same number of passes on each rank.

    The costliest documents go first, each to the cheapest pass that has room for it (R. L. Graham, 1969). Then passes
    of similar cost are made simultaneous: ranks wait for each other in every pass, where weights are gathered and
    gradients are reduced (FSDP), so a step takes the sum over passes of the costliest rank's.

    Args:
        lengths: The number of tokens of each document, shape [U].
        costs: The work for each document, in any unit, shape [U].
        ranks: The number of ranks.
        budget: The most tokens of a pass.
        min_passes: The fewest passes on each rank.

    Returns:
        For each rank and each of its passes, the documents' indices. If there are too few, some passes are empty.

    Raises:
        ConfigError: A document is longer than the budget.
    """
    if len(lengths) and lengths.max() > budget:
        raise ConfigError(
            f"a row of {lengths.max()} tokens is longer than a pass of {budget}; raise trainer.tokens_per_pass"
        )
    passes = max(min_passes, -(-int(lengths.sum()) // (budget * ranks)))
    while True:
        documents, loads, left = _assign_to_passes(lengths, costs, passes * ranks, budget)
        if not left:
            break
        passes += max(1, left // (budget * ranks))
    order = np.argsort(-loads, kind="stable").reshape(passes, ranks)
    sums = np.zeros(ranks)
    for number, row in enumerate(order):  # the costliest of them to the rank with the least work
        order[number, np.argsort(sums, kind="stable")] = row
        sums += loads[order[number]]
    return [
        [np.asarray(documents[index], dtype=np.int64) for index in order[:, rank]] for rank in range(ranks)
    ]


def _assign_to_passes(
    lengths: NDArray[np.int64], costs: NDArray[np.float64], passes: int, budget: int
) -> tuple[list[list[int]], NDArray[np.float64], int]:
    """Assign documents to passes; returns each pass's documents and its cost, and the tokens that found no room."""
    assigned: list[list[int]] = [[] for _ in range(passes)]
    loads, free, left = np.zeros(passes), np.full(passes, budget, dtype=np.int64), 0
    for document in np.argsort(-costs, kind="stable").tolist():
        number = int(np.where(free >= lengths[document], loads, np.inf).argmin())
        if free[number] < lengths[document]:
            left += int(lengths[document])
            continue
        assigned[number].append(document)
        loads[number] += costs[document]
        free[number] -= lengths[document]
    return assigned, loads, left


PAD_TOKEN = 0
"""The token id that pads rows on the right. Attention is causal, so no token attends to it."""
NO_DOCUMENT = -1


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainBatch:
    """Contexts and the loss tokens that are predicted from them.

    Attributes:
        tokens: Token ids of all contexts, one after the other, shape [sum of lengths].
        lengths: The number of tokens of each context, shape [U].
        context: The index of each loss token's context, shape [T].
        position: The position in the context whose hidden state predicts the loss token, shape [T].
        target: The loss token, shape [T].
        old_logprobs: Its behaviour log-probability, shape [T].
        versions: The version of the weights that it was sampled from, shape [T].
        advantages: Its advantage, shape [T].
        trajectory: The index of its trajectory, shape [T]. A trajectory's tokens are in the order of sampling.
        group: The index of the trajectory's group, shape [T].
        rewards: Its immediate reward, shape [T]: the trajectory's reward at the trajectory's last token, 0 before.
        index: Its position among the loss tokens of the whole batch, shape [T].
        total: The number of loss tokens of the whole batch, of which this may be a part.
        weights: Its weight from `token_weights` in its update, shape [T]; None before updates are made.
        reference_logprobs: Its log-probability under the reference policy, shape [T]; None without one.
        proximal_logprobs: Its log-probability under the trainer's weights before the first update on the batch, shape
            [T]; 0 for a token of that update; None if no other token needs it.
        values: The critic's value of the state before it, before the first update, shape [T]; None without a critic.
        returns: The critic's target, shape [T]; None without a critic.
        shares_prefixes: Whether a pass computes once what several of its contexts begin with.
    """

    tokens: NDArray[np.int32]
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
    index: NDArray[np.int64]
    total: int
    weights: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    proximal_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    shares_prefixes: bool = False

    @classmethod
    def from_samples(cls, samples: Sequence[TrainSample]) -> Self:
        """Lay samples out as arrays. Samples with the same tokens before their last loss token share a context.

        Raises:
            ValueError: A sample begins with a loss token, or there is no loss token at all.
        """
        index_by_context: dict[bytes, int] = {}
        contexts: list[NDArray[np.int32]] = []
        selected: list[tuple[TrainSample, NDArray[np.int64]]] = []
        owners: list[int] = []
        ends: dict[int, tuple[int, float]] = {}
        count = 0
        for sample in samples:
            positions = np.flatnonzero(np.asarray(sample.loss_mask, dtype=np.bool_))
            if not positions.size:
                continue
            if positions[0] == 0:
                raise ValueError(
                    "expected every loss token to follow a prompt, got a row that begins with one"
                )
            context = np.asarray(sample.tokens[: positions[-1]], dtype=np.int32)
            owners.append(index_by_context.setdefault(context.tobytes(), len(index_by_context)))
            if owners[-1] == len(contexts):
                contexts.append(context)
            selected.append((sample, positions))
            count += len(positions)
            ends[sample.trajectory] = (count - 1, sample.reward)
        if not contexts:
            raise ValueError("expected at least one loss token in a batch, got none")
        rewards = np.zeros(count, dtype=np.float32)
        for last, reward in ends.values():
            rewards[last] = reward
        counts = [len(positions) for _, positions in selected]

        def select_field(name: str, dtype: type[np.generic]) -> NDArray[Any]:
            return np.concatenate(
                [np.asarray(getattr(sample, name), dtype=dtype)[positions] for sample, positions in selected]
            )

        def repeat_field(name: str, dtype: type[np.generic]) -> NDArray[Any]:
            return np.repeat(
                np.asarray([getattr(sample, name) for sample, _ in selected], dtype=dtype), counts
            )

        return cls(
            tokens=np.concatenate(contexts),
            lengths=np.asarray([len(tokens) for tokens in contexts], dtype=np.int64),
            context=np.repeat(np.asarray(owners, dtype=np.int64), counts),
            position=np.concatenate([positions for _, positions in selected]) - 1,
            target=select_field("tokens", np.int64),
            old_logprobs=select_field("logprobs", np.float32),
            versions=select_field("versions", np.int64),
            advantages=repeat_field("advantage", np.float32),
            trajectory=repeat_field("trajectory", np.int64),
            group=repeat_field("group", np.int64),
            rewards=rewards,
            index=np.arange(count),
            total=count,
        )

    def __len__(self) -> int:
        """The number of loss tokens."""
        return len(self.target)

    def with_reference(self, logprobs: NDArray[np.float32]) -> Self:
        """Return the batch with the reference policy's log-probabilities, shape [T]."""
        return replace(self, reference_logprobs=logprobs)

    @property
    def computed(self) -> NDArray[np.int64]:
        """The number of tokens that a pass over the batch computes for each context, shape [U].

        If prefixes are shared, this is without the tokens that another context before it has.
        """
        if not self.shares_prefixes:
            return self.lengths
        order, shared = sort_by_prefix(self.tokens, self.lengths)
        computed = self.lengths.copy()
        computed[order] -= shared
        return computed

    def take(self, tokens: NDArray[np.int64]) -> Self:
        """Return the part of the batch with the given loss tokens, and only the contexts that they need."""
        used_contexts, context = np.unique(self.context[tokens], return_inverse=True)
        first = (np.cumsum(self.lengths) - self.lengths)[used_contexts]
        lengths = self.lengths[used_contexts]
        per_token = {
            field.name: values[tokens]
            for field in fields(self)
            if field.name not in _CONTEXT_FIELDS and (values := getattr(self, field.name)) is not None
        }
        return replace(
            self,
            **per_token,
            tokens=self.tokens[np.repeat(first, lengths) + _positions_in_contexts(lengths)],
            lengths=lengths,
            context=context.astype(np.int64),
        )

    def split_by_trajectory(self, parts: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
        """Shuffle trajectories into parts of nearly equal number; returns the loss tokens of each part that has any."""
        if parts == 1:
            return [np.arange(len(self))]
        order = generator.permutation(np.unique(self.trajectory))
        chunks = (chunk for chunk in np.array_split(order, parts) if len(chunk))
        return [np.flatnonzero(np.isin(self.trajectory, chunk)) for chunk in chunks]

    def pack_rows(self, *, in_one_row: bool = False, multiple_of: int = 1) -> "PackedRows":
        """Lay the contexts out for one forward pass.

        Args:
            in_one_row: Put them one after the other in a single row, for attention with document boundaries.
            multiple_of: Rows are padded to a multiple of this length.
        """
        if self.shares_prefixes and not in_one_row and (forest := self._pack_forest(multiple_of)) is not None:
            return forest
        if in_one_row:
            row = np.zeros(len(self.lengths), dtype=np.int64)
            offset, rows, length = np.cumsum(self.lengths) - self.lengths, 1, int(self.lengths.sum())
        else:
            (row, offset, rows), length = pack(self.lengths), int(self.lengths.max())
        shape = (rows, -(-length // multiple_of) * multiple_of)
        tokens, positions = np.full(shape, PAD_TOKEN, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        document = np.full(shape, NO_DOCUMENT, dtype=np.int64)
        context = np.repeat(np.arange(len(self.lengths)), self.lengths)
        position = _positions_in_contexts(self.lengths)
        target = (row[context], offset[context] + position)
        tokens[target], positions[target], document[target] = self.tokens, position, context
        return PackedRows(
            tokens=tokens,
            positions=positions,
            document=document,
            row=row[self.context],
            column=offset[self.context] + self.position,
            target=self.target,
            one_a_row=rows == len(self.lengths),
        )

    def _pack_forest(self, multiple_of: int) -> "PackedRows | None":
        """Lay the contexts out in one row with shared prefixes; None if they share none."""
        order, shared = sort_by_prefix(self.tokens, self.lengths)
        if not shared.any():
            return None
        forest = lay_out(self.lengths[order], shared)
        count = len(forest.last)
        blocks = max(1, count // block_length(int(self.lengths.max())))
        queries = -(-count // (blocks * multiple_of)) * multiple_of  # blocks of equal length, little padding
        shape = (1, queries * blocks)
        first = np.cumsum(self.lengths) - self.lengths
        position, lengths = _positions_in_contexts(self.lengths), self.lengths[order]
        columns = np.empty(len(self.tokens), dtype=np.int64)
        columns[np.repeat(first[order], lengths) + _positions_in_contexts(lengths)] = forest.columns
        tokens, positions = np.full(shape, PAD_TOKEN, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        document = np.full(shape, NO_DOCUMENT, dtype=np.int64)
        last = np.arange(queries * blocks)
        tokens[0, columns], positions[0, columns] = self.tokens, position
        document[0, :count], last[:count] = 0, forest.last
        return PackedRows(
            tokens=tokens,
            positions=positions,
            document=document,
            row=np.zeros(len(self), dtype=np.int64),
            column=columns[first[self.context] + self.position],
            target=self.target,
            one_a_row=True,
            blocks=find_keys(last, queries),
        )


_CONTEXT_FIELDS = frozenset({"tokens", "lengths", "context", "total", "shares_prefixes"})
"""Fields of a batch that have no entry per loss token, or are recomputed for a part."""


def _positions_in_contexts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each token in its context."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedRows:
    """The input of the model for one pass.

    Attributes:
        tokens: Token ids, shape [B, L].
        positions: The position of each token in its document, shape [B, L].
        document: The index of each token's context, shape [B, L]; `NO_DOCUMENT` for padding.
        row: The row of the hidden state from which each loss token is predicted, shape [T].
        column: The column of that hidden state, shape [T].
        target: The loss tokens, shape [T].
        one_a_row: Whether each row holds one document, so that causal attention alone separates documents.
        blocks: The keys of each block of queries, if the row is a forest of contexts, whose `document` is 0; otherwise
            None.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    document: NDArray[np.int64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    target: NDArray[np.int64]
    one_a_row: bool
    blocks: KeyBlocks | None = None

    @property
    def valid(self) -> int:
        """The number of tokens that are not padding."""
        return int((self.document != NO_DOCUMENT).sum())
