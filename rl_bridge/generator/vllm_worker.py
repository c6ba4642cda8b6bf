"""Extensions of vLLM's worker that replace weights in place. vLLM loads these classes by name.

An engine in its own process gets the weights through anonymous memory, which is written once and read in place. Weights
on a GPU (`monarch.transport=cuda_ipc`) are read where they are, and only their addresses are sent.

If the owner of that process is killed, nothing else would end it. So when this module is imported there, before the
model is loaded, it has the kernel kill the process with its owner. The process also ignores a terminal's Ctrl-C, which
reaches every process of the foreground group: vLLM would end the engine, while its owner still has to stop everything
in order.
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
    """A mixin of vLLM's worker (`worker_extension_cls`) for an engine in this process."""

    model_runner: Any
    device: Any
    reload_weights: Any

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        """Replace the weights in place.

        Uses `reload_weights` rather than `load_weights`: on a CPU the linear layers keep prepacked copies of their
        weights, which only the former renews. It omits an output layer that shares the embedding's weights, since
        nothing is loaded under that layer's own name, so that layer's copy is renewed here. Experts' weights are packed
        on a CPU only when their kernel is made, so it is made anew.
        """
        if self.device.type == "cpu":
            for layer in self.model_runner.get_model().modules():
                method: Any = getattr(layer, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    method.moe_kernel = None
        # Moved first, so that a GPU does the type conversion: vLLM gives the process only one CPU thread.
        moved_weights = ((name, value.to(self.device)) for name, value in state.items())
        self.reload_weights(
            weights_iterator=moved_weights
        )  # the worker's method sets vLLM's configuration, which layers may need
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and "lm_head.weight" not in state:
            head.quant_method.process_weights_after_loading(head)


@dataclass(slots=True, frozen=True)
class Handover:
    """The location of tensors in the memory of another process on this machine."""

    pid: int
    fd: int
    inode: int
    nbytes: int
    parts: Mapping[str, StoredPart]


class WeightSender:
    """The sending side. Its memory is reused: each `write` overwrites the tensors of the previous one."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def write(self, state: Mapping[str, Tensor]) -> bytes:
        """Copy tensors to memory that another process on this machine can read, as long as this process lives.

        A snapshot on a GPU, which is held until the other process has read it, is not copied.

        Returns:
            A pickled `Handover` or `SnapshotState`, as bytes so that msgpack can encode it.
        """
        if isinstance(state, SnapshotState) and isinstance(state.held, Buffers):
            return pickle.dumps(state)
        parts, nbytes = layout(own_shards(without_data(state), rank=0), header=HEADER)
        if self._segment is None or self._segment.nbytes < nbytes:
            self.close()
            self._segment = Segment(nbytes)
        segment = self._segment
        memory = torch.frombuffer(segment.map, dtype=torch.uint8)
        for name, part in parts.items():  # one by one, because a snapshot assembles each tensor on access
            copy_all([(view(memory, part), state[name])])
        return pickle.dumps(Handover(os.getpid(), segment.fd, segment.inode, segment.nbytes, parts))

    def close(self) -> None:
        """Release the memory."""
        segment, self._segment = self._segment, None
        if segment is not None:
            with contextlib.suppress(BufferError):  # during a write: the memory is freed with the process
                segment.close()


class WeightReceiver:
    """The receiving side. It keeps its mapping: page faults of a new mapping cost more than a copy."""

    def __init__(self) -> None:
        self._inode: int | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def read(self, data: bytes) -> Mapping[str, Tensor]:
        """Return the tensors in place, read-only, valid until the sender's next `write`."""
        handover: Handover | SnapshotState = pickle.loads(data)
        if isinstance(handover, SnapshotState):
            return handover
        if self._inode != handover.inode:
            fd, _, self._bytes = map_segment(handover.pid, handover.fd, handover.nbytes)
            os.close(fd)
            self._inode = handover.inode
        return {name: view(self._bytes, part) for name, part in handover.parts.items()}


def end_with_owner() -> None:
    """Have this process killed when its owner ends, or at once if it has ended already; does nothing in the owner."""
    owner = int(os.environ[OWNER_VARIABLE])
    if os.getpid() == owner:
        return
    die_with_parent()
    if os.getppid() != owner:
        os.kill(os.getpid(), signal.SIGKILL)
    if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if OWNER_VARIABLE in os.environ:
    end_with_owner()


class OwnedWeightLoader(WeightLoader):
    """A mixin of vLLM's worker (`worker_extension_cls`) for an engine or ranks in their own processes."""

    def load_handover(self, data: bytes) -> None:
        """Replace the weights in place by those that the owner has written."""
        receiver: WeightReceiver = self.__dict__.setdefault("ropewalk_weight_receiver", WeightReceiver())
        state = receiver.read(data)
        if isinstance(state, SnapshotState) and isinstance(state.held, Buffers):
            with contextlib.closing(state.held):  # the tensors are copies: no mapping is needed afterwards
                self.load_policy(state.copy_to(self.device))
        else:
            self.load_policy(state)
