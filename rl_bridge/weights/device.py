"""The transport between processes on the same GPU: a version stays in GPU memory, and readers map it by CUDA IPC.

Each buffer has a segment of shared memory whose lock and generation say whether the buffer may be read or overwritten,
as they do for the segment's own bytes in `local`. A reader maps a buffer only while it holds the segment, so the
publisher never frees memory that others have mapped.

The memory is allocated by CUDA rather than by PyTorch. PyTorch's allocator may place a tensor in an expandable segment
(`expandable_segments`), whose descriptors other processes get by pidfd_getfd, which containers refuse; and its
reference counts assume one reader per tensor.
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
"""Allocations are multiples of this and so have blocks of their own: CUDA IPC maps whole blocks."""
ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceAddress:
    """The address of a buffer for readers.

    Attributes:
        segment: The segment whose lock and generation apply to the buffer.
        handle: CUDA's IPC handle of the buffer, for other processes on this machine.
        nbytes: The size of the buffer.
        gpu: The UUID of the GPU, because its index differs between processes.
    """

    segment: SegmentAddress
    handle: bytes
    nbytes: int
    gpu: str


class DevicePublisher(SegmentPublisher):
    """The sending side: a GPU buffer for each segment, which itself holds only its header."""

    def __init__(self, *, depth: int, timeout_s: float) -> None:
        super().__init__(depth=depth, timeout_s=timeout_s)
        self._buffers: dict[Segment, tuple[Tensor, bytes]] = {}

    def _segment_bytes(self, nbytes: int) -> int:
        return HEADER

    def _target(self, segment: Segment, nbytes: int, devices: Collection[torch.device]) -> Tensor:
        device = _find_own_gpu(devices)
        buffer, _ = self._buffers.get(segment, (None, b""))
        if buffer is None or len(buffer) < nbytes or buffer.device != device:
            buffer = None
            self._release_resources(segment)  # before the allocation: there may not be room for both
            buffer, handle = allocate(nbytes, device)
            self._buffers[segment] = buffer, handle
        return buffer

    async def _address(self, segment: Segment, parts: Mapping[str, StoredPart]) -> DeviceAddress:
        buffer, handle = self._buffers[segment]
        return DeviceAddress(
            segment=self._segment_address(segment),
            handle=handle,
            nbytes=len(buffer),
            gpu=_get_uuid(buffer.device),
        )

    def _release_resources(self, segment: Segment) -> None:
        self._buffers.pop(segment, None)


class DeviceReader(SegmentReader):
    """The receiving side. The tensors are not write-protected: do not write to them."""

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[Mapping[int, Tensor]]:
        """See `TransportReader`. The bytes are the publishers' own, on their GPU."""
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
    """The buffers of ranks, each mapped on first access, so that a process that only forwards them needs no GPU.

    They can be pickled. A buffer that has not been mapped is lost when its publisher ends.
    """

    def __init__(self, addresses: Mapping[int, tuple[DeviceAddress, int]]) -> None:
        self._addresses = addresses
        self._mapped_buffers: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[type["Buffers"], tuple[Mapping[int, tuple[DeviceAddress, int]]]]:
        return Buffers, (self._addresses,)

    def __getitem__(self, rank: int) -> Tensor:
        if rank not in self._mapped_buffers:
            self._mapped_buffers[rank] = open_memory(*self._addresses[rank])
        return self._mapped_buffers[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def close(self) -> None:
        """Wait for pending copies on the GPU, and unmap the buffers."""
        for device in {tensor.device for tensor in self._mapped_buffers.values()}:
            torch.cuda.synchronize(device)
        self._mapped_buffers.clear()


def _find_own_gpu(devices: Collection[torch.device]) -> torch.device:
    """Return the GPU of the tensors to be published; any GPU for a rank without tensors."""
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


def _get_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _find_gpu(gpu: str) -> torch.device:
    _require_cuda()
    visible = {_get_uuid(device): device for device in map(_gpu_at, range(torch.cuda.device_count()))}
    if gpu not in visible:
        raise WeightsError(
            f"cannot read weights on GPU {gpu}: process {os.getpid()} was given {', '.join(visible)}; by the transport "
            "'cuda_ipc' trainer and generator share a GPU (monarch.colocate), by 'shared_memory' they need not"
        )
    return visible[gpu]


def _gpu_at(index: int) -> torch.device:
    return torch.device("cuda", index)


_own_buffers: "weakref.WeakValueDictionary[bytes, Tensor]" = weakref.WeakValueDictionary()
"""This process's own buffers by handle, because CUDA cannot open a handle in the process that made it."""


def allocate(nbytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Allocate at least `nbytes` of GPU memory that other processes can open; returns it with its handle.

    Raises WeightsError if there is not enough memory.
    """
    nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    pointer, handle = ctypes.c_void_p(), _Handle()
    with torch.cuda.device(device):
        try:
            _call("cudaMalloc", ctypes.byref(pointer), nbytes)
        except WeightsError:
            torch.cuda.empty_cache()  # torch's cache of free memory
            _call("cudaMalloc", ctypes.byref(pointer), nbytes)
        buffer = _as_tensor(pointer, nbytes, device, release="cudaFree")
        _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
    _own_buffers[bytes(handle)] = buffer
    return buffer, bytes(handle)


def open_memory(address: DeviceAddress, pid: int) -> Tensor:
    """Map a buffer of process `pid`, for as long as tensors refer to it."""
    device = _find_gpu(address.gpu)
    if pid == os.getpid():
        return _own_buffers[address.handle]
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
    """Memory in the form that torch can wrap; released when no tensor refers to it any more."""

    def __init__(self, pointer: int, nbytes: int, device: torch.device, release: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }
        # Not at exit: the driver releases it then, and torch may be gone.
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
    runtime = _load_runtime()
    status = getattr(runtime, function)(*arguments)
    if status:
        runtime.cudaGetLastError()  # clears it; otherwise torch would raise it at its next kernel
        raise WeightsError(f"CUDA refused {function}: {runtime.cudaGetErrorString(status).decode()}")


@cache
def _load_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded; torch's bindings lack these functions."""
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
