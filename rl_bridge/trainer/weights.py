"""Weights that are read concurrently, or are offloaded from the device's memory."""

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
"""How long a GPU's memory may take to be there after its lock is."""
MEMORY_POLL_INTERVAL_S = 0.2


class Readers:
    """Counts readers; what would change the weights waits until there is none.

    Reading may begin and end in different threads.
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
        """Wait for the last reader; returns the seconds, exactly 0 without one.

        TrainingError where it does not end in time.
        """
        with self._changed:
            if not self._count:
                return 0.0
            started = time.perf_counter()
            if not self._changed.wait_for(lambda: self._count == 0, timeout=timeout_s):
                raise TrainingError(
                    f"expected the weights to be pushed within {timeout_s:g} s, they are still being read; "
                    "see what holds the store, or raise the time-out of collectives"
                )
            return time.perf_counter() - started


class Offload:
    """Copies in the host's memory, page-locked for a GPU, of tensors whose own memory is given back.

    The tensors stay who they are, and so do views of them: optimizer, FSDP and state dicts need not know. In between
    nothing may be read of them. The copies' memory is kept from one time to the next. It is as large as they are:
    `pin_memory` would round each of them up to a power of two.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._segments: list[Segment] = []
        self._away: dict[int, torch.UntypedStorage] = {}

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Copy them away, and give their memory back; nothing where that is done."""
        if self._away:
            return
        storages = {}
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            storages[local.untyped_storage()._cdata] = local.untyped_storage()
        self._make_room({key: storage.nbytes() for key, storage in storages.items()})
        for key, storage in storages.items():
            self._kept[key].copy_(_bytes_of(storage))
            storage.resize_(0)
        self._away = storages
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _make_room(self, sizes: Mapping[int, int]) -> None:
        """Have a copy's memory for each key; WeightsError where the host has not so much."""
        sizes = {
            key: size for key, size in sizes.items() if key not in self._kept or len(self._kept[key]) != size
        }
        if not sizes:
            return
        *places, end = accumulate(map(align, sizes.values()), initial=HEADER)
        self._segments.append(Segment(end))
        room = torch.frombuffer(self._segments[-1].map, dtype=torch.uint8)
        for place, (key, size) in zip(places, sizes.items(), strict=True):
            self._kept[key] = room[place : place + size]

    def restore(self) -> None:
        """Restore offloaded tensors; does nothing for the others.

        Where there is no room it is waited for: the lock of a GPU ends with the process that holds it, and memory of
        its children, such as an engine's, a little later.
        """
        ends = time.monotonic() + MEMORY_TIMEOUT_S
        for key, storage in list(self._away.items()):
            host_copy = self._kept[key]
            while storage.nbytes() < len(host_copy):
                try:
                    storage.resize_(len(host_copy))
                except torch.OutOfMemoryError:
                    if time.monotonic() > ends:
                        raise
                    time.sleep(MEMORY_POLL_INTERVAL_S)
            _bytes_of(storage).copy_(host_copy)
            del self._away[key]  # not before: whoever runs out of memory here may come again


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
