"""The transport for those who run TorchStore already: its storage volumes hold what has been published.

A volume is a process apart, so what is in it outlives its publisher. TorchStore 0.1.2 asks for an older torch and an
older Monarch; what it needs on this one is `_Controller`, below.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from torch import Tensor

from rl_bridge.errors import MissingDependencyError, SnapshotOverwrittenError, WeightsError
from rl_bridge.weights.local import Needed, Room, new_memory
from rl_bridge.weights.snapshot import Key, Publication, Snapshot, StoredPart, key_text

try:
    from monarch.actor import endpoint, this_host, this_proc
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
        if self.storage_volumes is None:
            self.strategy, self.storage_volumes, self.num_storage_volumes = SingletonStrategy(), volumes, 1
            await self.strategy.set_storage_volumes(volumes)
            self.is_initialized = True


class _Volume(StorageVolume):  # type: ignore[misc]
    """TorchStore's volume, which tells what is in it: the controller does not know of what was put half way."""

    store: Any

    @endpoint  # type: ignore[untyped-decorator]
    async def names(self) -> list[str]:
        return list(self.store.kv)

    @endpoint  # type: ignore[untyped-decorator]
    async def discard(self, name: str) -> None:
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


class VolumePublisher:
    """The sending side; `depth` versions stay readable at once, and a transfer may take `timeout_s`."""

    header = 0

    def __init__(self, volumes: Volumes, *, depth: int, timeout_s: float) -> None:
        self._volumes = volumes
        self._depth = depth
        self._timeout_s = timeout_s
        self._own = secrets.token_hex(4)
        # By series: a name of one's own, or the versions, all in one.
        self._sent: dict[str | None, deque[tuple[Key, str]]] = {}
        self._kept: Tensor | None = None

    @asynccontextmanager
    async def reserve(self, key: Key, publication: Publication, nbytes: int) -> AsyncIterator[Room]:
        """See `Publisher`. The room is sent to the volume when it is complete."""
        target, self._kept = self._kept, None
        if target is None or len(target) < nbytes:
            target = new_memory(nbytes)
        sent = self._sent.setdefault(key if isinstance(key, str) else None, deque(maxlen=self._depth))
        old = sent[0][0] if len(sent) == self._depth else None

        async def publish(parts: Mapping[str, StoredPart]) -> str:
            return await self._send(key, publication, target)

        try:
            yield Room(target=target, replaces=old, publish=publish)
        finally:
            self._kept = target

    async def _send(self, key: Key, publication: Publication, data: Tensor) -> str:
        """Send a snapshot to the volume; returns its name.

        Before that all is deleted of its series that nobody may read any more: what gives way to it, what has failed
        half way, and what publishers have left whom this group has followed.
        """
        series = key if isinstance(key, str) else None
        group = f"{series!r}/{publication.group}/"
        own, sent = f"{group}{self._own}/", self._sent[series]
        kept = [name for _, name in sent][-(self._depth - 1) :]
        name = f"{own}{key}/{publication.number}/{secrets.token_hex(4)}"
        try:
            async with asyncio.timeout(self._timeout_s):
                client = await self._volumes.client()
                for one in await self._volumes.names():
                    of_others = one.startswith(group) and not one.startswith(own)
                    if one.startswith(f"{series!r}/") and one not in kept and not of_others:
                        await self._volumes.delete(one)
                await client.put(name, data)
        except Exception as error:  # TorchStore raises nothing narrower
            raise WeightsError(f"cannot send {key_text(key)} to TorchStore: {error}") from error
        sent.append((key, name))
        return name

    async def close(self) -> None:
        """See `Publisher`."""
        self._kept = None
        self._sent.clear()


class VolumeReader:
    """The receiving side; a transfer may take `timeout_s`."""

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
