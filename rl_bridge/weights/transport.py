"""What a way of moving bytes has to offer; the store does the rest."""

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from torch import Tensor

from rl_bridge.weights.snapshot import Key, Publication, Snapshot, StoredPart

Needed: TypeAlias = Mapping[int, Collection[str]]
"""Which tensors a reader needs of which rank."""


class Slot(Protocol):
    """Room for what one rank publishes of one snapshot.

    Attributes:
        target: The room, shape [nbytes], of type uint8. Tensors go to where the layout says.
        replaces: The key that has been readable from this room so far; None where there was none.
    """

    target: Tensor
    replaces: Key | None

    async def publish(self, parts: Mapping[str, StoredPart]) -> object:
        """The target is complete: return where readers find it."""

    def release(self) -> None:
        """Give the slot back, whether or not it was published."""


class Publisher(Protocol):
    """The sending side, in the process of one rank.

    Attributes:
        header: Bytes that a slot's target needs in front of the first tensor.
    """

    header: int

    async def reserve(self, key: Key, publication: Publication, nbytes: int) -> Slot:
        """Get room for a snapshot; waits for readers who are in the way.

        Raises:
            WeightsError: There is no memory, or readers would not let go.
        """

    async def close(self) -> None:
        """Give everything back."""


class Reader(Protocol):
    """The receiving side."""

    def hold(self, snapshot: Snapshot, needed: Needed) -> AbstractAsyncContextManager[dict[int, Tensor]]:
        """Have the bytes of some ranks' segments, unchanged for the length of the block.

        Where the bytes lie that are not needed, anything may be.

        Raises:
            SnapshotOverwritten: They have been overwritten already.
            WeightsError: A publisher is gone.
        """

    async def close(self) -> None:
        """Let go of everything."""
