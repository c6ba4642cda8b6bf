"""Training samples as arrays.

A row's loss tokens depend only on the tokens before the last of them: its context. Rows with one context
(siblings that saw the same state, say) share it, so the forward pass sees each context once. That changes
no gradient: the loss is a sum over loss tokens either way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rl_bridge.types import TrainSample

PAD = 0
"""Fills contexts on the right. Attention is causal, so it is never looked at."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainBatch:
    """Contexts, and the loss tokens that hang from them.

    Attributes:
        contexts: Token ids, right-padded, shape [U, L].
        context: Which context each loss token belongs to, shape [T].
        position: The place in the context whose logits predict the loss token, shape [T].
        target: The loss token, shape [T].
        old_logprobs: Its behaviour log-probability, shape [T].
        advantages: Shape [T].
        trajectory: Which trajectory it belongs to, shape [T].
        reference_logprobs: Its log-probability under the reference policy, shape [T]; None without one.
    """

    contexts: NDArray[np.int32]
    context: NDArray[np.int64]
    position: NDArray[np.int64]
    target: NDArray[np.int64]
    old_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    trajectory: NDArray[np.int64]
    reference_logprobs: NDArray[np.float32] | None = None

    @classmethod
    def from_samples(cls, samples: Sequence[TrainSample]) -> Self:
        """Lay samples out as arrays.

        Raises:
            ValueError: A loss token has nothing before it, or there is no loss token at all.
        """
        contexts: dict[tuple[int, ...], int] = {}
        context: list[int] = []
        position: list[int] = []
        target: list[int] = []
        logprobs: list[float] = []
        advantages: list[float] = []
        trajectory: list[int] = []
        for sample in samples:
            places = [place for place, is_loss in enumerate(sample.loss_mask) if is_loss]
            if not places:
                continue
            if places[0] == 0:
                raise ValueError(
                    "expected every loss token to follow a prompt, got a row that begins with one"
                )
            key = tuple(sample.tokens[: places[-1]])
            number = contexts.setdefault(key, len(contexts))
            context.extend([number] * len(places))
            position.extend(place - 1 for place in places)
            target.extend(sample.tokens[place] for place in places)
            logprobs.extend(sample.logprobs[place] for place in places)
            advantages.extend([sample.advantage] * len(places))
            trajectory.extend([sample.trajectory] * len(places))
        if not contexts:
            raise ValueError("expected at least one loss token in a batch, got none")
        padded = np.full((len(contexts), max(map(len, contexts))), PAD, dtype=np.int32)
        for tokens, number in contexts.items():
            padded[number, : len(tokens)] = tokens
        return cls(
            contexts=padded,
            context=np.asarray(context, dtype=np.int64),
            position=np.asarray(position, dtype=np.int64),
            target=np.asarray(target, dtype=np.int64),
            old_logprobs=np.asarray(logprobs, dtype=np.float32),
            advantages=np.asarray(advantages, dtype=np.float32),
            trajectory=np.asarray(trajectory, dtype=np.int64),
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
        reference = self.reference_logprobs
        return type(self)(
            contexts=self.contexts[used],
            context=context.astype(np.int64),
            position=self.position[tokens],
            target=self.target[tokens],
            old_logprobs=self.old_logprobs[tokens],
            advantages=self.advantages[tokens],
            trajectory=self.trajectory[tokens],
            reference_logprobs=None if reference is None else reference[tokens],
        )

    def split_by_trajectory(self, parts: int, generator: np.random.Generator) -> list[Self]:
        """Shuffle trajectories into parts of nearly equal number; parts that would be empty are left out."""
        if parts == 1:
            return [self]
        order = generator.permutation(np.unique(self.trajectory))
        chunks = (np.isin(self.trajectory, chunk) for chunk in np.array_split(order, parts) if len(chunk))
        return [self.take(np.flatnonzero(chosen)) for chosen in chunks]

    def micro_batches(self, rows: int) -> Iterator[tuple[Self, NDArray[np.int64]]]:
        """Parts of at most `rows` contexts, each with the indices of its loss tokens in this batch."""
        for first in range(0, len(self.contexts), rows):
            chosen = np.flatnonzero((self.context >= first) & (self.context < first + rows))
            yield self.take(chosen), chosen
