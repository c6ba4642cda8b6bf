"""What vLLM's worker learns for us: it takes weights in place. vLLM loads these classes by name.

An engine in a process of its own gets them through anonymous memory, which is written once and read in place; those
on a GPU (`monarch.transport=cuda_ipc`) it reads where they are, and is told the addresses alone. That process belongs
to the one that started it: when its owner is killed, nobody else would end it. So the kernel is asked to, as soon as
this module is imported there, which is before the model is loaded. Nor is a terminal's Ctrl-C for it, which reaches
every process of the foreground group: vLLM would have it end the engine, while its owner, which decides, is still to
stop everything in order.
"""

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openenv_core.sandbox.kernel.libc import die_with_parent
from rl_bridge.generator.vllm_api import OWNER_VARIABLE
from rl_bridge.weights.assembly import SnapshotState, copy_all, view, without_data
from rl_bridge.weights.device import Buffers
from rl_bridge.weights.segments import HEADER, Segment, map_segment
from rl_bridge.weights.snapshot import StoredPart, layout, own_shards


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any
    device: Any
    reload_weights: Any

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        """Replace the weights in place.

        `reload_weights` rather than `load_weights`: on a CPU the linear layers keep prepacked copies of
        their weights, which only the former renews. It leaves out an output layer that shares the
        embedding's weights, since nothing is loaded under that layer's own name: its copy is renewed here.
        """
        # Moved first, so that a GPU converts them to its own type: vLLM gives the process one thread.
        moved = ((name, value.to(self.device)) for name, value in state.items())
        self.reload_weights(
            weights_iterator=moved
        )  # the worker's own: layers may ask for vLLM's configuration
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and "lm_head.weight" not in state:
            head.quant_method.process_weights_after_loading(head)


@dataclass(slots=True, frozen=True)
class Handover:
    """Where tensors lie, in the memory of another process of this machine."""

    pid: int
    fd: int
    inode: int
    nbytes: int
    parts: Mapping[str, StoredPart]


class WeightSender:
    """The sending side. Its memory is reused: the next `write` overwrites what the last one handed over."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def write(self, state: Mapping[str, Tensor]) -> bytes:
        """Copy tensors to where another process of this machine can read them, for as long as this one lives.

        Of a snapshot on a GPU, which is held until the other process has taken it, nothing is copied here.

        Returns:
            A pickled `Handover` or `SnapshotState`: of bytes alone, so that it travels by msgpack.
        """
        if isinstance(state, SnapshotState) and isinstance(state.held, Buffers):
            return pickle.dumps(state)
        parts, nbytes = layout(own_shards(without_data(state), rank=0), header=HEADER)
        if self._segment is None or self._segment.nbytes < nbytes:
            self.close()
            self._segment = Segment(nbytes)
        segment = self._segment
        room = torch.frombuffer(segment.map, dtype=torch.uint8)
        for name, part in parts.items():  # one by one: of a snapshot each is put together here
            copy_all([(view(room, part), state[name])])
        return pickle.dumps(Handover(os.getpid(), segment.fd, segment.inode, segment.nbytes, parts))

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

    def read(self, handed: bytes) -> Mapping[str, Tensor]:
        """The tensors in place, read-only, until the next `write` of the giver."""
        handover: Handover | SnapshotState = pickle.loads(handed)
        if isinstance(handover, SnapshotState):
            return handover
        if self._inode != handover.inode:
            fd, _, self._bytes = map_segment(handover.pid, handover.fd, handover.nbytes)
            os.close(fd)
            self._inode = handover.inode
        return {name: view(self._bytes, part) for name, part in handover.parts.items()}


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

    def load_handed_over(self, handed: bytes) -> None:
        """Replace the weights in place by those that the owner has written down."""
        receiver: WeightReceiver = self.__dict__.setdefault("ropewalk_weight_receiver", WeightReceiver())
        state = receiver.read(handed)
        if isinstance(state, SnapshotState) and isinstance(state.held, Buffers):
            with contextlib.closing(state.held):  # of copies nothing is left in memory that is another's
                self.load_policy(state.copied_to(self.device))
        else:
            self.load_policy(state)
