"""Examples one after another, epoch after epoch, each epoch in another order."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_bridge.data.examples import Example, Source
from rl_bridge.errors import ConfigError


@dataclass(kw_only=True, slots=True, frozen=True)
class DatasetState:
    """Where a dataset stands, as a checkpoint holds it.

    Attributes:
        taken: Examples handed out since the beginning of the run.
        seed: Decides the order.
        shuffle: Whether there is one to decide.
        digest: Of the examples.
    """

    taken: int
    seed: int
    shuffle: bool
    digest: str

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)


class Dataset:
    """An endless sequence of examples with a cursor. What stands at which place depends on the seed alone.

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
        self.taken = 0
        """Examples handed out."""

    def __len__(self) -> int:
        """Examples an epoch."""
        return len(self._source)

    @property
    def epoch(self) -> int:
        """Of the next example; counts from 0."""
        return self.taken // len(self)

    def sample(self) -> Example:
        """The next example."""
        example = self.at(self.taken)
        self.taken += 1
        return example

    def at(self, number: int) -> Example:
        """The example that is handed out as this one, counted from 0 over all epochs. The cursor stays."""
        epoch, place = divmod(number, len(self))
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
            self._epoch = epoch
        return self._source[int(self._order[place])]

    def state(self) -> dict[str, Any]:
        """Where it stands, JSON-able."""
        state = DatasetState(
            taken=self.taken, seed=self._seed, shuffle=self._shuffle, digest=self._source.digest
        )
        return state.to_json()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where a dataset stood.

        Raises:
            ConfigError: It was one of other examples, or of another order: what has been handed out already would be
                handed out again.
        """
        there, here = DatasetState(**state), DatasetState(**self.state())
        for name in ("digest", "seed", "shuffle"):
            if getattr(there, name) != getattr(here, name):
                raise ConfigError(
                    f"expected the dataset that the checkpoint knows, with {name}={getattr(there, name)!r}, "
                    f"got {getattr(here, name)!r}; go on with the same file, seed and order, or start a new run"
                )
        self.taken = there.taken

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self))
