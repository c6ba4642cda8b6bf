"""The weight store: immutable, versioned snapshots, resharded from the trainer's sharding to the reader's."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from rl_bridge.errors import SnapshotOverwrittenError, WeightsError
from rl_bridge.weights.assembly import SnapshotState, TensorRead, copy_all, plan_reads, view
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.local import Publisher, Reservation, SegmentPublisher, SegmentReader, TransportReader
from rl_bridge.weights.segments import has_died, own_origin
from rl_bridge.weights.snapshot import (
    Contribution,
    Key,
    Like,
    Publication,
    Shard,
    Snapshot,
    State,
    StoredPart,
    key_text,
    layout,
    own_shards,
)

if TYPE_CHECKING:
    from rl_bridge.weights.torch_store import Volumes

Transport: TypeAlias = Literal["shared_memory", "cuda_ipc", "rdma", "torchstore"]
T = TypeVar("T")

READABLE_VERSIONS = 2
"""The number of versions that stay readable at once."""
POLL_INTERVAL_S = 0.5
"""How often it is checked that the publishers are alive while a key is being published."""
MAX_ATTEMPTS = 3
"""The number of look-ups of a key that is overwritten between the look-up and the hold."""


class WeightStore:
    """A store of weight snapshots by key.

    It is made once, by `create`, in the process that owns the run, and sent to other processes as an argument of their
    actors; all of these clients share one directory. Published snapshots are immutable: one is overwritten only by a
    later `put`, when there are `READABLE_VERSIONS` newer ones, and never while a reader holds it. Readers on other
    machines hold a copy, and never see one that was overwritten while they fetched it.

    Args:
        directory: The directory of published snapshots.
        transport: How bytes are moved.
        timeout_s: The longest wait of `put` for readers on this machine that hold what is to be overwritten, and of
            readers for a key that is being published: the death of a publisher on another machine cannot be detected.
        transfer_timeout_s: The timeout of a transfer between machines, or to and from a volume; `timeout_s` by
            default.
        volumes: A running TorchStore, for that transport.
    """

    def __init__(
        self,
        directory: WeightDirectory,
        *,
        transport: Transport,
        timeout_s: float = 60.0,
        transfer_timeout_s: float | None = None,
        volumes: "Volumes | None" = None,
    ) -> None:
        self._directory = directory
        self._transport = transport
        self._timeout_s = timeout_s
        self._transfer_timeout_s = timeout_s if transfer_timeout_s is None else transfer_timeout_s
        self._volumes = volumes
        self._owner = True
        self._reset()

    @classmethod
    def create(cls, *, transport: Transport = "shared_memory", **options: Any) -> "WeightStore":
        """Make a store in the process that owns the run, with whose end it ends; `options` are the constructor's."""
        from rl_bridge.weights.actor import spawn_directory

        volumes = None
        if transport == "torchstore":
            from rl_bridge.weights.torch_store import Volumes

            volumes = Volumes()
        return cls(spawn_directory(), transport=transport, volumes=volumes, **options)

    def _reset(self) -> None:
        self._closed = False
        self._publisher, self._reader = self._make_transport()
        self._put_counts: dict[str | None, int] = {}  # versions are one series

    def _make_transport(self) -> tuple[Publisher, TransportReader]:
        timeout_s = self._transfer_timeout_s
        if self._transport == "shared_memory":
            return SegmentPublisher(depth=READABLE_VERSIONS, timeout_s=self._timeout_s), SegmentReader()
        if self._transport == "cuda_ipc":
            from rl_bridge.weights.device import DevicePublisher, DeviceReader

            return DevicePublisher(depth=READABLE_VERSIONS, timeout_s=self._timeout_s), DeviceReader()
        if self._volumes is not None:
            from rl_bridge.weights.torch_store import VolumePublisher, VolumeReader

            sender = VolumePublisher(self._volumes, depth=READABLE_VERSIONS, timeout_s=timeout_s)
            return sender, VolumeReader(self._volumes, self._directory, timeout_s=timeout_s)
        from rl_bridge.weights.rdma import BufferPublisher, BufferReader

        publisher = BufferPublisher(depth=READABLE_VERSIONS, timeout_s=timeout_s)
        return publisher, BufferReader(self._directory, timeout_s=timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        process_local = ("_closed", "_publisher", "_reader", "_put_counts")
        return {name: value for name, value in vars(self).items() if name not in process_local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _owner=False)
        self._reset()

    async def put(
        self,
        key: Key,
        state: State,
        *,
        rank: int = 0,
        ranks: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Publish a state dict; returns when this rank's part is copied, after which the weights may change.

        Args:
            key: The snapshot's key. An existing snapshot of this key is replaced; a version also replaces later
                versions, since those are from before the run went back.
            state: Dense tensors on any device. Each rank publishes its own shard of a DTensor, and rank 0 the whole of
                a plain tensor; nothing is gathered. A `LazySum` is computed when it is copied.
            rank: The caller's rank among the publishers of the snapshot.
            ranks: The number of publishers. Readers see the snapshot when all have published.
            dtype: The dtype to which floating-point tensors are cast when they are copied; None to keep theirs.

        Raises:
            WeightsError: The state is empty, there is not enough memory, readers did not release a segment in time, or
                the store is closed.
        """
        if not state:
            raise WeightsError("expected a state dict with at least one tensor, got an empty one")
        self._require_open()
        series = key if isinstance(key, str) else None
        self._put_counts[series] = self._put_counts.get(series, 0) + 1
        publication = Publication(group=self._directory.group(), number=self._put_counts[series])
        origin = own_origin(rank)
        shards = own_shards(state, rank=rank)
        parts, nbytes = layout(shards, header=self._publisher.header, dtype=dtype)
        devices = {shard.local.device for shard in shards.values()}
        async with self._publisher.reserve(key, rank, nbytes, devices) as reservation:
            await self._directory.announce(key, publication, origin, ranks, reservation.replaces)
            try:
                await _run_in_thread(lambda: _pack(reservation, shards, parts))
                location = await reservation.publish(parts)
                await self._directory.complete(
                    key, publication, Contribution(origin=origin, location=location, parts=parts)
                )
            except BaseException as error:
                reason = str(error) or type(error).__name__
                await asyncio.shield(self._directory.abandon(key, publication, rank, reason))
                raise

    async def get(self, key: Key, like: Like | None = None) -> dict[str, Tensor]:
        """Copy a snapshot; waits if it is being published.

        Args:
            key: The snapshot's key.
            like: The tensors wanted, in the dtypes given there: the part that a DTensor or a `ShardSpec` describes, or
                the whole for a plain tensor. None for every tensor, whole, on the CPU.

        Returns:
            Tensors that belong to the caller, on the devices of `like`, and DTensors where `like` has DTensors.

        Raises:
            WeightsError: The key does not exist or was not complete in time, its publisher died, or it does not fit
                `like`.
        """
        async with self._open_parts(key, like) as (reads, buffers):
            return await _run_in_thread(lambda: dict(SnapshotState(reads, buffers, like, copy=True)))

    @asynccontextmanager
    async def open(
        self, key: Key, like: Like | None = None, *, device: torch.device | str = "cpu"
    ) -> AsyncIterator[SnapshotState]:
        """Open a snapshot for a block, during which it is not overwritten.

        Nothing is assembled here: a tensor that one rank has published whole is viewed in place, and one in parts is
        assembled on access, on `device`. Do not keep tensors beyond the block, and do not write to them: shared memory
        is mapped read-only, so that a write kills the process; a GPU's memory (`cuda_ipc`) is the publisher's own. Key,
        `like` and errors are as for `get`.
        """
        async with self._open_parts(key, like) as (reads, buffers):
            yield SnapshotState(reads, buffers, like, device=device)

    async def close(self) -> None:
        """Release this process's resources; in the process that made the store, close it for all."""
        if self._owner and not self._closed:
            await self._directory.close()
        self._closed = True
        await self._publisher.close()
        await self._reader.close()
        if self._volumes is not None:
            await self._volumes.close()

    def _require_open(self) -> None:
        if self._closed:
            raise WeightsError("the weight store is closed")

    @asynccontextmanager
    async def _open_parts(
        self, key: Key, like: Like | None
    ) -> AsyncIterator[tuple[list[TensorRead], Mapping[int, Tensor]]]:
        async with AsyncExitStack() as stack:
            for attempt in range(MAX_ATTEMPTS):
                snapshot = await self._find(key)
                reads = plan_reads(snapshot, like)
                needed: dict[int, set[str]] = {}
                for read in reads:
                    for rank, _ in read.sources:
                        needed.setdefault(rank, set()).add(read.name)
                try:
                    buffers = await stack.enter_async_context(self._reader.hold(snapshot, needed))
                except SnapshotOverwrittenError:
                    if attempt + 1 == MAX_ATTEMPTS:
                        raise
                    continue  # it may have been published again since
                break
            yield reads, buffers

    async def _find(self, key: Key) -> Snapshot:
        self._require_open()
        deadline = time.monotonic() + self._timeout_s
        while True:
            result = await self._directory.find(key, POLL_INTERVAL_S)
            if isinstance(result, Snapshot):
                return result
            for origin in result.origins:
                if has_died(origin):
                    raise WeightsError(
                        f"{key_text(key)} will not be whole: rank {origin.rank} (process {origin.pid}) died while "
                        "it published it; a restarted trainer publishes it again"
                    )
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"expected {key_text(key)} within {self._timeout_s:g} s, still missing are ranks "
                    f"{sorted([*result.missing, *(origin.rank for origin in result.origins)])}"
                )


def _pack(reservation: Reservation, shards: Mapping[str, Shard], parts: Mapping[str, StoredPart]) -> None:
    plain_shards = {name: shard for name, shard in shards.items() if shard.added is None}
    copy_all((view(reservation.target, parts[name]), shard.local) for name, shard in plain_shards.items())
    for name in shards.keys() - plain_shards.keys():  # one by one, since each sum takes memory
        copy_all([(view(reservation.target, parts[name]), shards[name].values())])


async def _run_in_thread(work: Callable[[], T]) -> T:
    """Run a function on a thread; on cancellation still wait for its end, since it uses the caller's resources."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
