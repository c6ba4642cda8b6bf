"""The transport for those who run TorchStore already: its storage volumes hold what has been published.

A volume is a process apart, so what is in it outlives its publisher. TorchStore 0.1.2 asks for an older torch
and an older Monarch; what it needs on this one is `_Controller`, below.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rl_bridge.errors import MissingDependencyError, SnapshotOverwrittenError, WeightsError
from rl_bridge.weights.snapshot import Key, Publication, Snapshot, StoredPart, key_text
from rl_bridge.weights.transport import Needed

try:
    from monarch.actor import endpoint, this_host, this_proc
except ModuleNotFoundError as missing:
    raise MissingDependencyError("torchmonarch") from missing
try:
    from torchstore.client import LocalClient
    from torchstore.controller import Controller
    from torchstore.storage_volume import StorageVolume
    from torchstore.strategy import SingletonStrategy
except ModuleNotFoundError as missing:
    raise MissingDependencyError(
        "torchstore",
        "install it with `pip install --no-deps torchstore==0.1.2 pygtrie`; with its dependencies it would bring "
        "an older torch and an older Monarch",
    ) from missing

STOP_TIMEOUT_S = 10.0


def _awaitable(method: Callable[..., Any]) -> Any:
    """The same endpoint, to be awaited: Monarch wants all of an actor's endpoints alike."""

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = call.__qualname__ = method.__name__
    return endpoint(call)


class _Controller(Controller):  # type: ignore[misc]
    """TorchStore's controller, that every client may ask to begin."""

    storage_volumes: Any

    get_controller_strategy = _awaitable(Controller.get_controller_strategy._method)
    keys = _awaitable(Controller.keys._method)
    locate_volumes = _awaitable(Controller.locate_volumes._method)
    notify_delete = _awaitable(Controller.notify_delete._method)
    notify_put = _awaitable(Controller.notify_put._method)

    @endpoint  # type: ignore[untyped-decorator]
    async def begin(self, volumes: Any) -> None:
        """Take the volumes, the first time."""
        if self.storage_volumes is None:
            self.strategy, self.storage_volumes, self.num_storage_volumes = SingletonStrategy(), volumes, 1
            await self.strategy.set_storage_volumes(volumes)
            self.is_initialized = True


class _Volume(StorageVolume):  # type: ignore[misc]
    """TorchStore's volume, which tells what is in it: the controller does not know of what was put half way."""

    store: Any

    @endpoint  # type: ignore[untyped-decorator]
    async def names(self) -> list[str]:
        """What is in it."""
        return list(self.store.kv)

    @endpoint  # type: ignore[untyped-decorator]
    async def discard(self, name: str) -> None:
        """Let go of what has this name, if anything has."""
        self.store.kv.pop(name, None)


class Volumes:
    """A running TorchStore: a volume in a process of its own, and a controller in this one. Travels to clients."""

    def __init__(self) -> None:
        self._procs = this_host().spawn_procs(per_host={"volumes": 1})
        self._volumes = self._procs.spawn("weights_volume", _Volume, SingletonStrategy.get_volume_id)
        self._controller = this_proc().spawn("weights_torchstore", _Controller)
        self._client: LocalClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_volumes": self._volumes, "_controller": self._controller, "_procs": None, "_client": None}

    async def client(self) -> Any:
        """TorchStore's client in this process."""
        if self._client is None:
            await self._controller.begin.call_one(self._volumes)
            strategy = await self._controller.get_controller_strategy.call_one()
            self._client = LocalClient(controller=self._controller, strategy=strategy)
        return self._client

    async def names(self) -> list[str]:
        """What is in the volume, also of what was put there half way."""
        names: list[str] = await self._volumes.names.call_one()
        return names

    async def delete(self, name: str) -> None:
        """Have nothing of this name in the volume any more, whoever put it there, and however far that came."""
        client = await self.client()
        try:
            await client.delete(name)
        except Exception:  # TorchStore raises nothing narrower
            if await client.exists(name):
                raise
            # Somebody else was faster, or the controller was never told of it.
            await self._volumes.discard.call_one(name)

    async def close(self) -> None:
        """End the volume's process; for the process that started it. Bounded; raises nothing."""
        procs, self._procs = self._procs, None
        if procs is not None:
            with suppress(Exception):  # what cannot be reached ends with this process
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await procs.stop()


class VolumeSlot:
    """Memory that is sent to a volume when it is complete, as a `SnapshotSlot`."""

    def __init__(
        self, publisher: "VolumePublisher", key: Key, publication: Publication, target: Tensor
    ) -> None:
        self._publisher = publisher
        self._key = key
        self._publication = publication
        self.target = target
        self._old = publisher.next_to_go(key)
        self.replaces = None if self._old is None else self._old[0]

    async def publish(self, parts: Mapping[str, StoredPart]) -> str:
        """See `SnapshotSlot`."""
        return await self._publisher.send(self._key, self._publication, self.target, self._old)

    def release(self) -> None:
        """See `SnapshotSlot`."""
        self._publisher.keep(self.target)


class VolumePublisher:
    """The sending side of TorchStore.

    Args:
        volumes: Where to.
        depth: Versions that stay readable at once.
        timeout_s: How long a transfer may take.
    """

    header = 0

    def __init__(self, volumes: Volumes, *, depth: int, timeout_s: float) -> None:
        self._volumes = volumes
        self._depth = depth
        self._timeout_s = timeout_s
        self._sent: dict[str | None, deque[tuple[Key, str]]] = {}
        # What is still to be deleted, by series: it is forgotten when that has been done, not before.
        self._left_over: dict[str | None, set[str]] = {}
        self._swept: set[str | None] = set()
        self._kept: Tensor | None = None

    async def reserve(self, key: Key, publication: Publication, nbytes: int) -> VolumeSlot:
        """See `Publisher`."""
        target, self._kept = self._kept, None
        if target is None or len(target) < nbytes:
            target = torch.empty(max(1, nbytes), dtype=torch.uint8)
        return VolumeSlot(self, key, publication, target)

    def next_to_go(self, key: Key) -> tuple[Key, str] | None:
        """What gives way to the next snapshot, as key and name."""
        sent = self._sent.get(_series(key))
        return sent[0] if sent and len(sent) >= self._depth else None

    async def send(
        self, key: Key, publication: Publication, data: Tensor, old: tuple[Key, str] | None
    ) -> str:
        """Send a snapshot to the volume, and delete what it replaces there; returns its name."""
        series = _series(key)
        name = f"{series!r}/{publication.group}/{key}/{publication.number}/{secrets.token_hex(4)}"
        sent = self._sent.setdefault(series, deque())
        left_over = self._left_over.setdefault(series, set())
        if old is not None and old in sent:
            sent.remove(old)
            left_over.add(old[1])
        whole = False
        try:
            async with asyncio.timeout(self._timeout_s):
                client = await self._volumes.client()
                await self._sweep(series, publication.group)
                for one in tuple(left_over):
                    await self._volumes.delete(one)
                    left_over.discard(one)
                await client.put(name, data)
            whole = True
        except Exception as error:  # TorchStore raises nothing narrower
            raise WeightsError(f"cannot send {key_text(key)} to TorchStore: {error}") from error
        finally:
            if whole:
                sent.append((key, name))
            else:
                left_over.add(name)  # the volume may have it all the same
        return name

    async def _sweep(self, series: str | None, group: str) -> None:
        """Before the first of a series, delete what publishers before us have left of it: they are gone."""
        if series in self._swept:
            return
        for name in await self._volumes.names():
            if name.startswith(f"{series!r}/") and not name.startswith(f"{series!r}/{group}/"):
                await self._volumes.delete(name)
        self._swept.add(series)

    def keep(self, target: Tensor) -> None:
        """Memory to pack the next snapshot into."""
        self._kept = target

    async def close(self) -> None:
        """See `Publisher`."""
        self._kept = None
        self._sent.clear()
        self._left_over.clear()
        self._swept.clear()


class VolumeReader:
    """The receiving side of TorchStore.

    Args:
        volumes: Where from.
        timeout_s: How long a transfer may take.
    """

    def __init__(self, volumes: Volumes, *, timeout_s: float) -> None:
        self._volumes = volumes
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[dict[int, Tensor]]:
        """See `TransportReader`. The bytes are this process's own."""
        try:
            async with asyncio.timeout(self._timeout_s):
                client = await self._volumes.client()
                names = [snapshot.contributions[rank].location for rank in needed]
                fetched = await asyncio.gather(*(client.get(name) for name in names))
        except KeyError as error:
            raise SnapshotOverwrittenError(
                f"{key_text(snapshot.key)} has been deleted for a newer one"
            ) from error
        except Exception as error:  # TorchStore raises nothing narrower
            why = str(error)
            if isinstance(error, TimeoutError):
                why = f"no end within {self._timeout_s:g} s; a slow network needs a higher trainer.timeout_s"
            raise WeightsError(f"cannot fetch {key_text(snapshot.key)} from TorchStore: {why}") from error
        yield dict(zip(needed, fetched, strict=True))

    async def close(self) -> None:
        """See `TransportReader`."""


def _series(key: Key) -> str | None:
    """What snapshots follow one another under: a name of one's own, or the versions, all in one."""
    return key if isinstance(key, str) else None
