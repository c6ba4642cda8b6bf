"""Transfers under a lease, for as long as they take: short leases, renewed by readers that live."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from rl_bridge.errors import SnapshotOverwritten, WeightsError
from rl_bridge.weights.directory import Directory
from rl_bridge.weights.snapshot import Snapshot

LEASE_S = 60.0
"""How long a lease lasts that is not renewed: so long a reader that died elsewhere is in a publisher's way."""


async def under_lease(
    directory: Directory, snapshot: Snapshot, holder: str, transfer: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    """Transfer what lies with publishers, while none of it is overwritten.

    Args:
        directory: Keeps the lease.
        snapshot: What is transferred.
        holder: Names this reading of it.
        transfer: Does it. It is cancelled when the lease cannot be kept.

    Raises:
        SnapshotOverwritten: The snapshot has been given up, and what was transferred may be anything.
        WeightsError: The directory did not answer at the beginning or the end, or the store is closed.
        Exception: What the transfer raised.
    """
    key, publication = snapshot.key, snapshot.publication

    async def renew() -> None:
        await directory.lease(key, publication, holder, LEASE_S)

    async def keep() -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await renew()
            except SnapshotOverwritten:
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
