"""The transport between processes that see the same GPU: a version stays on the card, and readers map it by CUDA IPC.

A segment of shared memory stands beside each buffer and keeps what it does for the bytes of `local`: its lock and its
generation say whether the buffer may be read, and whether it may be overwritten. A reader maps a buffer for as long as
it holds the segment and no longer, so that the publisher never frees what others have mapped.

The memory is CUDA's own rather than PyTorch's. Of PyTorch's allocator a tensor may lie in a segment that can grow
(`expandable_segments`), whose descriptors other processes take by pidfd_getfd, which containers refuse; and its count
of references is made for one reader a tensor.
"""

import ctypes
import os
import weakref
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_bridge.errors import WeightsError
from rl_bridge.weights.local import Needed, SegmentPublisher, SegmentReader
from rl_bridge.weights.segments import HEADER, Segment, SegmentAddress
from rl_bridge.weights.snapshot import Snapshot, StoredPart

HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE of <driver_types.h>
BLOCK_BYTES = 2 << 20
"""Memory of a multiple of it is a block of its own; a smaller piece would share one, and CUDA IPC maps whole blocks."""
ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceAddress:
    """The address of a buffer for readers.

    Attributes:
        segment: Whose lock and generation are the buffer's.
        handle: CUDA's name for the buffer, in other processes of this machine.
        nbytes: Of the buffer.
        gpu: UUID of the card; its number differs between processes.
    """

    segment: SegmentAddress
    handle: bytes
    nbytes: int
    gpu: str


class DevicePublisher(SegmentPublisher):
    """The sending side: a buffer on the card beside each segment, which then holds its header alone."""

    def __init__(self, *, depth: int, timeout_s: float) -> None:
        super().__init__(depth=depth, timeout_s=timeout_s)
        self._buffers: dict[Segment, tuple[Tensor, bytes]] = {}

    def _segment_bytes(self, nbytes: int) -> int:
        return HEADER

    def _target(self, segment: Segment, nbytes: int, devices: Collection[torch.device]) -> Tensor:
        device = _own_gpu(devices)
        buffer, _ = self._buffers.get(segment, (None, b""))
        if buffer is None or len(buffer) < nbytes or buffer.device != device:
            buffer = None
            self._forget(segment)  # first: there may not be room for both
            buffer, handle = allocate(nbytes, device)
            self._buffers[segment] = buffer, handle
        return buffer

    async def _address(self, segment: Segment, parts: Mapping[str, StoredPart]) -> DeviceAddress:
        buffer, handle = self._buffers[segment]
        return DeviceAddress(
            segment=self._segment_address(segment),
            handle=handle,
            nbytes=len(buffer),
            gpu=_uuid(buffer.device),
        )

    def _forget(self, segment: Segment) -> None:
        self._buffers.pop(segment, None)


class DeviceReader(SegmentReader):
    """The receiving side. Nothing protects the tensors from being written to: do not."""

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[Mapping[int, Tensor]]:
        """See `TransportReader`. The bytes are the publishers' own, on their card."""
        with ExitStack() as stack:
            addresses: dict[int, tuple[DeviceAddress, int]] = {}
            for rank in sorted(needed):
                contribution = snapshot.contributions[rank]
                address = contribution.location
                assert isinstance(address, DeviceAddress)
                stack.enter_context(self.attach(snapshot.key, contribution.origin, address.segment))
                addresses[rank] = address, contribution.origin.pid
            buffers = Buffers(addresses)
            try:
                yield buffers
            finally:
                buffers.close()


class Buffers(Mapping[int, Tensor]):
    """The buffers of ranks, each mapped when it is asked for: who hands them on needs no GPU. They travel by pickle.

    What has not been mapped is gone when its publisher ends.
    """

    def __init__(self, addresses: Mapping[int, tuple[DeviceAddress, int]]) -> None:
        self._addresses = addresses
        self._mapped: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[type["Buffers"], tuple[Mapping[int, tuple[DeviceAddress, int]]]]:
        return Buffers, (self._addresses,)

    def __getitem__(self, rank: int) -> Tensor:
        if rank not in self._mapped:
            self._mapped[rank] = open_memory(*self._addresses[rank])
        return self._mapped[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def close(self) -> None:
        """Wait for copies on the card, which may be on their way still, and let go of the buffers."""
        for device in {tensor.device for tensor in self._mapped.values()}:
            torch.cuda.synchronize(device)
        self._mapped.clear()


def _own_gpu(devices: Collection[torch.device]) -> torch.device:
    """The card of the tensors that are to be published; of a rank that has none of them any card will do."""
    gpus = [device for device in devices if device.type == "cuda"]
    if devices and not gpus:
        raise WeightsError(
            "expected weights on a GPU with the transport 'cuda_ipc', got them on "
            f"{', '.join(sorted(map(str, devices)))}; monarch.transport=shared_memory takes them from there"
        )
    _require_cuda()
    return gpus[0] if gpus else torch.device("cuda", torch.cuda.current_device())


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise WeightsError(
            "expected a GPU in each process that publishes or reads weights by the transport 'cuda_ipc', "
            f"process {os.getpid()} was given none; monarch.transport=shared_memory needs none"
        )


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _find_gpu(gpu: str) -> torch.device:
    _require_cuda()
    visible = {_uuid(device): device for device in map(_nth_gpu, range(torch.cuda.device_count()))}
    if gpu not in visible:
        raise WeightsError(
            f"cannot read weights on GPU {gpu}: process {os.getpid()} was given {', '.join(visible)}; by the transport "
            "'cuda_ipc' trainer and generator share a GPU (monarch.colocate), by 'shared_memory' they need not"
        )
    return visible[gpu]


def _nth_gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


_own: "weakref.WeakValueDictionary[bytes, Tensor]" = weakref.WeakValueDictionary()
"""Buffers of this process by their handles, which CUDA does not open in the process that they are of."""


def allocate(nbytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Have at least so much memory on a card that others can open, and its handle. WeightsError without room for it."""
    nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    pointer, handle = ctypes.c_void_p(), _Handle()
    with torch.cuda.device(device):
        try:
            _call("cudaMalloc", ctypes.byref(pointer), nbytes)
        except WeightsError:
            torch.cuda.empty_cache()  # what torch keeps for tensors to come
            _call("cudaMalloc", ctypes.byref(pointer), nbytes)
        buffer = _as_tensor(pointer, nbytes, device, release="cudaFree")
        _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
    _own[bytes(handle)] = buffer
    return buffer, bytes(handle)


def open_memory(address: DeviceAddress, pid: int) -> Tensor:
    """Map a buffer of process `pid`, for as long as tensors look at it."""
    device = _find_gpu(address.gpu)
    if pid == os.getpid():
        return _own[address.handle]
    pointer, handle = ctypes.c_void_p(), _Handle.from_buffer_copy(address.handle)
    try:
        with torch.cuda.device(device):
            _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ENABLE_PEER_ACCESS)
    except WeightsError as error:
        raise WeightsError(
            f"cannot map the weights of process {pid} on GPU {address.gpu}: {error}; did it end? Where a container "
            "allows no CUDA IPC, monarch.transport=shared_memory needs none"
        ) from error
    return _as_tensor(pointer, address.nbytes, device, release="cudaIpcCloseMemHandle")


class _Memory:
    """Memory as torch takes it over; given back when no tensor looks at it any more."""

    def __init__(self, pointer: int, nbytes: int, device: torch.device, release: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }
        # Where the process ends the driver does it, and torch is no more.
        weakref.finalize(self, _release, release, pointer, device).atexit = False


def _as_tensor(pointer: ctypes.c_void_p, nbytes: int, device: torch.device, *, release: str) -> Tensor:
    assert pointer.value is not None
    return torch.as_tensor(_Memory(pointer.value, nbytes, device, release), device=device)


def _release(release: str, pointer: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        _call(release, ctypes.c_void_p(pointer))


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def _call(function: str, *arguments: Any) -> None:
    runtime = _runtime()
    status = getattr(runtime, function)(*arguments)
    if status:
        runtime.cudaGetLastError()  # taken, or torch would raise it at its next kernel
        raise WeightsError(f"CUDA refused {function}: {runtime.cudaGetErrorString(status).decode()}")


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded; its own bindings lack these functions."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch says no types
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libcudart"):
            runtime = ctypes.CDLL(f"/{path}")
            break
    else:
        raise WeightsError(
            "expected torch to have loaded libcudart, which the transport 'cuda_ipc' calls, found none"
        )
    pointer = ctypes.c_void_p
    runtime.cudaMalloc.argtypes = [ctypes.POINTER(pointer), ctypes.c_size_t]
    runtime.cudaFree.argtypes = [pointer]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(pointer), _Handle, ctypes.c_uint]
    runtime.cudaIpcCloseMemHandle.argtypes = [pointer]
    runtime.cudaGetErrorString.argtypes = [ctypes.c_int]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
