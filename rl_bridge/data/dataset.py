"""Examples one after another, epoch after epoch, each epoch in another order."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_bridge.data.examples import Example, Source
from rl_bridge.errors import ConfigError


class Dataset:
    """An endless sequence of examples. What stands at which place depends on the seed alone.

    Args:
        source: The examples.
        seed: Decides the order of every epoch.
        shuffle: Whether every epoch has an order of its own; otherwise that of the source.
    """

    def __init__(self, source: Source, *, seed: int, shuffle: bool = True) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: NDArray[np.int64] = np.arange(0)
        self._taken = 0

    def __len__(self) -> int:
        """Examples an epoch."""
        return len(self._source)

    def sample(self) -> Example:
        """The next example, for whoever does not number them."""
        example = self.at(self._taken)
        self._taken += 1
        return example

    def at(self, number: int) -> Example:
        """The example that stands at this number, counted from 0 over all epochs."""
        epoch, place = divmod(number, len(self))
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
            self._epoch = epoch
        return self._source[int(self._order[place])]

    def identity(self) -> dict[str, Any]:
        """What decides which example stands at which number, as a checkpoint holds it."""
        return {"digest": self._source.digest, "seed": self._seed, "shuffle": self._shuffle}

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self))


def require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another dataset than a checkpoint knows.

    Args:
        before: The `Dataset.identity` in the checkpoint.
        now: That of the dataset at hand.

    Raises:
        ConfigError: It has other examples, or another order: some would be answered twice and others never.
    """
    for name, value in before.items():
        if value != now[name]:
            raise ConfigError(
                f"expected the dataset that the checkpoint knows, with {name}={value!r}, got {now[name]!r}; go on "
                "with the same examples (data.source), seed and order (data.shuffle), or start a new run"
            )
