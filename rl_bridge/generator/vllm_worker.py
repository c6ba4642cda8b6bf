"""What vLLM's worker learns for us: it takes weights in place. vLLM loads these classes by name.

An engine in a process of its own gets them through anonymous memory, which is written once and read in place. That
process belongs to the one that started it: when its owner is killed, nobody else would end it. So the kernel is asked
to, as soon as this module is imported there, which is before the model is loaded. Nor is a terminal's Ctrl-C for it,
which reaches every process of the foreground group: vLLM would have it end the engine, while its owner, which decides,
is still to stop everything in order.
"""

import contextlib
import mmap
import os
import signal
import threading
import warnings
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from openenv_core.sandbox.kernel.libc import die_with_parent
from rl_bridge.generator.vllm_api import OWNER_VARIABLE
from rl_bridge.weights.assembly import copy_all, without_data
from rl_bridge.weights.segments import HEADER, Segment
from rl_bridge.weights.snapshot import align


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any
    device: Any

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        """Replace the weights in place.

        `reload_weights` rather than `load_weights`: on a CPU the linear layers keep prepacked copies of
        their weights, which only the former renews. It leaves out an output layer that shares the
        embedding's weights, since nothing is loaded under that layer's own name: its copy is renewed here.
        """
        # Moved first, so that a GPU converts them to its own type: vLLM gives the process one thread.
        moved = ((name, value.to(self.device)) for name, value in state.items())
        self.model_runner.reload_weights(weights_iterator=moved)
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and "lm_head.weight" not in state:
            head.quant_method.process_weights_after_loading(head)


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
        """Copy tensors to where another process of this machine can read them, for as long as this one lives."""
        tensors: list[HandedTensor] = []
        end = HEADER
        for name, tensor in without_data(state).items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": end})
            end = align(end + tensor.nbytes)
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


def end_with_owner() -> None:
    """Have this process killed when the one that started it ends, or at once where it has ended already; not before."""
    owner = int(os.environ[OWNER_VARIABLE])
    if os.getpid() == owner:
        return
    die_with_parent()
    if os.getppid() != owner:
        os.kill(os.getpid(), signal.SIGKILL)
    if threading.current_thread() is threading.main_thread():  # nobody else may
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if OWNER_VARIABLE in os.environ:
    end_with_owner()


class OwnedWeightLoader(WeightLoader):
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    def load_handed_over(self, handover: Handover) -> None:
        """Replace the weights in place by those that the owner has written down."""
        receiver: WeightReceiver = self.__dict__.setdefault("ropewalk_weight_receiver", WeightReceiver())
        self.load_policy(receiver.read(handover))
