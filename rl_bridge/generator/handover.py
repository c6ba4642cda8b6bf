"""Weights for an engine in another process: through anonymous memory, which is written once and read in place."""

import contextlib
import mmap
import os
import warnings
from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor

from rl_bridge.weights.assembly import without_data
from rl_bridge.weights.attachments import copy_all
from rl_bridge.weights.segments import HEADER, Segment
from rl_bridge.weights.snapshot import aligned


class HandedTensor(TypedDict):
    """Where a tensor lies."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


class Handover(TypedDict):
    """Where tensors lie; of plain types, so that it travels by msgpack."""

    pid: int
    fd: int
    inode: int
    nbytes: int
    tensors: list[HandedTensor]


class WeightSender:
    """The sending side. Its memory is reused: the next `write` overwrites what the last one handed over."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def write(self, state: Mapping[str, Tensor]) -> Handover:
        """Copy tensors to where another process of this machine can read them, for as long as this one lives.

        Raises:
            WeightsError: There is no memory for them.
        """
        tensors: list[HandedTensor] = []
        end = HEADER
        for name, tensor in without_data(state).items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": end})
            end = aligned(end + tensor.nbytes)
        if self._segment is None or self._segment.nbytes < end:
            self.close()
            self._segment = Segment(end)
        room = torch.frombuffer(self._segment.map, dtype=torch.uint8)
        for place in tensors:  # one by one: of a snapshot each is put together here
            copy_all([(_view(room, place), state[place["name"]])])
        return Handover(
            pid=os.getpid(),
            fd=self._segment.fd,
            inode=self._segment.inode,
            nbytes=self._segment.nbytes,
            tensors=tensors,
        )

    def close(self) -> None:
        """Give the memory back."""
        segment, self._segment = self._segment, None
        if segment is not None:
            with contextlib.suppress(BufferError):  # being written still: the memory goes with the process
                segment.close()


class WeightReceiver:
    """The receiving side. It keeps its mapping: the first look at each page of a new one costs more than a copy."""

    def __init__(self) -> None:
        self._inode: int | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def read(self, handover: Handover) -> dict[str, Tensor]:
        """The tensors in place, read-only, until the next `write` of the giver."""
        if self._inode != handover["inode"]:
            self._bytes = _map(handover)
            self._inode = handover["inode"]
        return {place["name"]: _view(self._bytes, place) for place in handover["tensors"]}


def _view(room: Tensor, place: HandedTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, place["dtype"])
    shape = place["shape"]
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return room[place["offset"] : place["offset"] + nbytes].view(dtype).view(shape)


def _map(handover: Handover) -> Tensor:
    fd = os.open(f"/proc/{handover['pid']}/fd/{handover['fd']}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, handover["nbytes"], prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only is meant
        return torch.frombuffer(mapped, dtype=torch.uint8)
