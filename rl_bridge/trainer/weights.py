"""Concurrent readers of the trainer's weights, and offloading of weights from the device's memory."""

import threading
import time
from collections.abc import Iterable, Mapping
from itertools import accumulate
from types import TracebackType

import torch
from torch import Tensor

from rl_bridge.errors import TrainingError
from rl_bridge.weights.segments import HEADER, Segment
from rl_bridge.weights.snapshot import align

MEMORY_TIMEOUT_S = 30.0
"""How long to wait for a GPU's memory to become free after its turn was taken."""
MEMORY_POLL_INTERVAL_S = 0.2


class Readers:
    """Counts readers of the weights; an update waits until there is none.

    Reading may begin and end on different threads.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_until_none(self, timeout_s: float) -> float:
        """Wait until there are no readers; returns the seconds, exactly 0 without readers.

        Raises TrainingError after the timeout.
        """
        with self._changed:
            if not self._count:
                return 0.0
            started_at = time.perf_counter()
            if not self._changed.wait_for(lambda: self._count == 0, timeout=timeout_s):
                raise TrainingError(
                    f"expected the weights to be pushed within {timeout_s:g} s, they are still being read; "
                    "see what holds the store, or raise trainer.collective_timeout_s"
                )
            return time.perf_counter() - started_at


class Offload:
    """Moves tensors' data to the host's memory, page-locked for a GPU, and back, to free the device's memory.

    Tensor objects and views of them stay valid, so optimizer, FSDP and state dicts are unaffected; but their data must
    not be read in between. The host's memory is kept for the next time. It has exactly the tensors' size, whereas
    `pin_memory` would round each up to a power of two.
    """

    def __init__(self) -> None:
        self._host_copies: dict[int, Tensor] = {}
        self._segments: list[Segment] = []
        self._offloaded: dict[int, torch.UntypedStorage] = {}

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors to the host and free their device memory; does nothing if they are offloaded already."""
        if self._offloaded:
            return
        storages = {}
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # DTensors hold a local one
            storages[local.untyped_storage()._cdata] = local.untyped_storage()
        self._allocate_host_copies({key: storage.nbytes() for key, storage in storages.items()})
        for key, storage in storages.items():
            self._host_copies[key].copy_(_view_bytes(storage))
            storage.resize_(0)
        self._offloaded = storages
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _allocate_host_copies(self, sizes: Mapping[int, int]) -> None:
        """Allocate host memory for each key's copy; WeightsError if the host lacks memory."""
        sizes = {
            key: size
            for key, size in sizes.items()
            if key not in self._host_copies or len(self._host_copies[key]) != size
        }
        if not sizes:
            return
        *offsets, total = accumulate(map(align, sizes.values()), initial=HEADER)
        self._segments.append(Segment(total))
        memory = torch.frombuffer(self._segments[-1].map, dtype=torch.uint8)
        for offset, (key, size) in zip(offsets, sizes.items(), strict=True):
            self._host_copies[key] = memory[offset : offset + size]

    def restore(self) -> None:
        """Restore offloaded tensors; does nothing for others.

        Waits if the device lacks memory: when the previous holder of the turn dies, the turn is free at once, but the
        memory of its child processes, such as an engine's, only a little later.
        """
        deadline = time.monotonic() + MEMORY_TIMEOUT_S
        for key, storage in list(self._offloaded.items()):
            host_copy = self._host_copies[key]
            while storage.nbytes() < len(host_copy):
                try:
                    storage.resize_(len(host_copy))
                except torch.OutOfMemoryError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(MEMORY_POLL_INTERVAL_S)
            _view_bytes(storage).copy_(host_copy)
            del self._offloaded[key]  # only now, so that a call that runs out of memory can be retried


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
