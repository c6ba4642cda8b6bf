"""The transport over TorchStore, which keeps published snapshots in its storage volumes.

A volume is a separate process, so its content outlives the publisher. TorchStore 0.1.2 requires an older torch and an
older Monarch; `_Controller` below adapts it to this one.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_bridge.errors import MissingDependencyError, WeightsError
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.local import Needed, Reservation, allocate_memory, make_overwritten_error
from rl_bridge.weights.snapshot import ALIGNMENT, Key, Snapshot, StoredPart, key_text

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
MARK_BYTES, _MARK_BITS = 8, 62


def _make_async_endpoint(method: Callable[..., Any]) -> Any:
    """Make an asynchronous endpoint of a synchronous one: Monarch does not allow both kinds in one actor."""

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = call.__qualname__ = method.__name__
    return endpoint(call)


class _Controller(Controller):  # type: ignore[misc]
    """TorchStore's controller, which any client may initialize."""

    storage_volumes: Any

    get_controller_strategy = _make_async_endpoint(Controller.get_controller_strategy._method)
    keys = _make_async_endpoint(Controller.keys._method)
    locate_volumes = _make_async_endpoint(Controller.locate_volumes._method)
    notify_delete = _make_async_endpoint(Controller.notify_delete._method)
    notify_put = _make_async_endpoint(Controller.notify_put._method)

    @endpoint  # type: ignore[untyped-decorator]
    async def begin(self, volumes: Any) -> None:
        if self.storage_volumes is None:
            self.strategy, self.storage_volumes, self.num_storage_volumes = SingletonStrategy(), volumes, 1
            await self.strategy.set_storage_volumes(volumes)
            self.is_initialized = True


class Volumes:
    """A running TorchStore: a volume in its own process and a controller in this one. It is sent to clients."""

    def __init__(self) -> None:
        self._procs = this_host().spawn_procs(per_host={"volumes": 1})
        self._volumes = self._procs.spawn("weights_volume", StorageVolume, SingletonStrategy.get_volume_id)
        self._controller = this_proc().spawn("weights_torchstore", _Controller)
        self._client: LocalClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_volumes": self._volumes, "_controller": self._controller, "_procs": None, "_client": None}

    async def client(self) -> Any:
        """Return TorchStore's client in this process."""
        if self._client is None:
            await self._controller.begin.call_one(self._volumes)
            strategy = await self._controller.get_controller_strategy.call_one()
            self._client = LocalClient(controller=self._controller, strategy=strategy)
        return self._client

    async def close(self) -> None:
        """End the volume's process, if this process started it. Bounded in time; raises nothing."""
        procs, self._procs = self._procs, None
        if procs is not None:
            with suppress(Exception):  # an unreachable volume ends with this process
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await procs.stop()


@dataclass(slots=True, frozen=True)
class VolumeAddress:
    """The address of a published part for readers: its name in the volume, and the mark in its first eight bytes."""

    name: str
    mark: int


class VolumePublisher:
    """The sending side; `depth` versions stay readable at once, and a transfer may take `timeout_s`.

    A rank cycles through `depth` names in the volume, and so overwrites what an earlier publisher has left or sent
    halfway. A publisher that was considered lost but still sends therefore uses the same names as its successor; each
    transfer has its own mark, by which a reader tells whose bytes it got.
    """

    header = ALIGNMENT

    def __init__(self, volumes: Volumes, *, depth: int, timeout_s: float) -> None:
        self._volumes = volumes
        self._depth = depth
        self._timeout_s = timeout_s
        self._slots: dict[str | None, list[tuple[int, Key | None]]] = {}
        """By series (a name, or None for all versions): each place in the volume with the key that is complete there,
        or was before a failed transfer; oldest first."""
        self._memory: Tensor | None = None

    @asynccontextmanager
    async def reserve(
        self, key: Key, rank: int, nbytes: int, devices: Collection[torch.device] = ()
    ) -> AsyncIterator[Reservation]:
        """See `Publisher`. The memory is sent to the volume by `publish`."""
        target, self._memory = self._memory, None
        if target is None or len(target) < nbytes:
            target = allocate_memory(nbytes)
        series = key if isinstance(key, str) else None
        slots = self._slots.setdefault(series, [(slot, None) for slot in range(self._depth)])
        slot, replaced_key = slots.pop(0)
        is_complete = False

        async def publish(parts: Mapping[str, StoredPart]) -> VolumeAddress:
            nonlocal is_complete
            name, mark = f"{series!r}/{rank}/{slot}", secrets.randbits(_MARK_BITS)
            target[:MARK_BYTES].view(torch.int64)[0] = mark
            try:
                async with asyncio.timeout(self._timeout_s):
                    await (await self._volumes.client()).put(name, target)
            except Exception as error:  # TorchStore raises no narrower type
                raise WeightsError(f"cannot send {key_text(key)} to TorchStore: {error}") from error
            slots.append((slot, key))
            is_complete = True
            return VolumeAddress(name, mark)

        try:
            yield Reservation(target=target, replaces=replaced_key, publish=publish)
        finally:
            self._memory = target
            if (
                not is_complete
            ):  # the next to be overwritten; `replaced_key` is reported until a transfer succeeds
                slots.insert(0, (slot, replaced_key))

    async def close(self) -> None:
        """See `Publisher`."""
        self._memory = None


class VolumeReader:
    """The receiving side; a transfer may take `timeout_s`."""

    def __init__(self, volumes: Volumes, directory: WeightDirectory, *, timeout_s: float) -> None:
        self._volumes = volumes
        self._directory = directory
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[dict[int, Tensor]]:
        """See `TransportReader`. The bytes are fetched into this process's memory."""
        try:
            async with asyncio.timeout(self._timeout_s):
                client = await self._volumes.client()
                addresses: list[Any] = [snapshot.contributions[rank].location for rank in needed]
                fetched = await asyncio.gather(*(client.get(address.name) for address in addresses))
        except Exception as error:  # TorchStore raises no narrower type
            reason = str(error)
            if isinstance(error, TimeoutError):
                reason = (
                    f"no end within {self._timeout_s:g} s; a slow network needs a higher trainer.timeout_s"
                )
            raise WeightsError(f"cannot fetch {key_text(snapshot.key)} from TorchStore: {reason}") from error
        marks = [int(data[:MARK_BYTES].view(torch.int64)[0]) for data in fetched]
        current = await self._directory.is_current(snapshot.key, snapshot.publication)
        if not current or marks != [address.mark for address in addresses]:
            raise make_overwritten_error(snapshot.key)
        yield dict(zip(needed, fetched, strict=True))

    async def close(self) -> None:
        """See `TransportReader`."""
