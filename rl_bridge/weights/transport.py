"""What a way of moving bytes has to offer, and transfers under a lease."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from rl_bridge.errors import SnapshotOverwrittenError, WeightsError
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.snapshot import Key, Publication, Snapshot, StoredPart

Needed: TypeAlias = Mapping[int, Collection[str]]
"""Which tensors a reader needs of which rank."""


@dataclass(kw_only=True, slots=True)
class Room:
    """Room for what one rank publishes of one snapshot.

    Attributes:
        target: The room, shape [nbytes], of type uint8. Tensors go to where the layout says.
        replaces: The key that has been readable from this room so far; None where there was none.
        publish: To be called when the target is complete; returns where readers find it.
    """

    target: Tensor
    replaces: Key | None
    publish: Callable[[Mapping[str, StoredPart]], Awaitable[object]]


class Publisher(Protocol):
    """The sending side, in the process of one rank.

    Attributes:
        header: Bytes that a room's target needs in front of the first tensor.
    """

    header: int

    def reserve(self, key: Key, publication: Publication, nbytes: int) -> AbstractAsyncContextManager[Room]:
        """Have room for a snapshot; waits for readers who are in the way.

        Raises:
            WeightsError: There is no memory, or readers would not let go.
        """

    async def close(self) -> None:
        """Give everything back."""


class TransportReader(Protocol):
    """The receiving side."""

    def hold(self, snapshot: Snapshot, needed: Needed) -> AbstractAsyncContextManager[dict[int, Tensor]]:
        """Have the bytes of some ranks' segments, unchanged for the length of the block.

        Where the bytes lie that are not needed, anything may be.

        Raises:
            SnapshotOverwrittenError: They have been overwritten already.
            WeightsError: A publisher is gone.
        """

    async def close(self) -> None:
        """Let go of everything."""


LEASE_DURATION_S = 60.0
"""How long a lease lasts that is not renewed: so long a reader that died elsewhere is in a publisher's way."""


async def under_lease(
    directory: WeightDirectory,
    snapshot: Snapshot,
    holder: str,
    transfer: Callable[[], Coroutine[Any, Any, object]],
) -> None:
    """Transfer what lies with publishers, while none of it is overwritten.

    Args:
        directory: Keeps the lease.
        snapshot: What is transferred.
        holder: Names this reading of it.
        transfer: Does it. It is cancelled when the lease cannot be kept.

    Raises:
        SnapshotOverwrittenError: The snapshot has been given up, and what was transferred may be anything.
        WeightsError: The directory did not answer at the beginning or the end, or the store is closed.
        Exception: What the transfer raised.
    """
    key, publication = snapshot.key, snapshot.publication

    async def renew() -> None:
        await directory.lease(key, publication, holder, LEASE_DURATION_S)

    async def keep() -> None:
        while True:
            await asyncio.sleep(LEASE_DURATION_S / 3)
            try:
                await renew()
            except SnapshotOverwrittenError:
                raise
            except WeightsError:
                continue  # whether the bytes count is said at the end; a directory that is busy now may answer then

    work: list[asyncio.Task[object]] = []
    try:
        await renew()
        work += [asyncio.create_task(transfer()), asyncio.create_task(keep())]
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        # No publisher has waited for a renewal that came too late. What has been given up is not leased again, so
        # this says so, also where it is what the transfer has failed of.
        await renew()
        next(task for task in work if task.done()).result()
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        with suppress(WeightsError):  # it ends by itself
            await asyncio.shield(directory.end_lease(key, publication, holder))


def new_memory(nbytes: int) -> Tensor:
    """Bytes of this process's own."""
    try:
        return torch.empty(max(1, nbytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise WeightsError(f"cannot reserve {nbytes} bytes: {error}") from error
