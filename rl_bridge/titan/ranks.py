"""The ranks that train one model together: how they meet, and how the death of one ends the waits of others."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_bridge.errors import BridgeError, RankLostError
from rl_bridge.files import replace_file
from rl_bridge.interface import own_address
from rl_bridge.weights.snapshot import Box, LazySum, StackItem, State, is_dtensor

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
_ERROR_MARK = "gloo"
"""gloo raises plain RuntimeErrors with this text."""
_RENDEZVOUS_POLL_INTERVAL_S = 0.05


@dataclass(kw_only=True, slots=True, frozen=True)
class Rank:
    """One rank among those that train together.

    Attributes:
        index: The rank, from 0.
        count: The number of ranks.
        rendezvous_file: The file with the address of rank 0's store, in a folder that all of them see, until they have
            met. Each start has its own. None for a single rank.
        timeout_s: How long a rank waits for the others when they meet and in each collective, in seconds.
    """

    index: int = 0
    count: int = 1
    rendezvous_file: Path | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


SINGLE_RANK = Rank()


def join_process_group(device: torch.device, rank: Rank = SINGLE_RANK) -> None:
    """Join this process to a process group, unless it belongs to one already.

    Raises RankLostError if the others do not join. No port has to be agreed on: rank 0 takes a free one for its store,
    and writes it to the rendezvous file.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with convert_rank_errors("when the ranks met"):
        dist.init_process_group(
            backend,
            store=_make_store(rank),
            rank=rank.index,
            world_size=rank.count,
            timeout=timedelta(seconds=rank.timeout_s),
        )
    if rank.rendezvous_file is not None and rank.index == 0:
        rank.rendezvous_file.unlink(missing_ok=True)


def limit_waits(timeout_s: float) -> None:
    """Set the timeout of all existing process groups: subgroups do not inherit that of the default group."""
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) != "fake":  # the backend of a single rank
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextlib.contextmanager
def convert_rank_errors(expectation: str) -> Iterator[None]:
    """Turn errors of collectives that mean that a sibling is gone or late into `RankLostError`.

    The process group is unusable afterwards: the rank has to exit, and all ranks to be restarted.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_rank_error(error):
            raise
        raise RankLostError(
            f"expected every rank of the trainer {expectation}, one is gone or was late: {error}; "
            "the trainer goes on from its last checkpoint once all of its ranks are restarted"
        ) from error


def is_rank_error(error: BaseException) -> bool:
    """Whether an error is a collective's own failure, due to another rank, rather than that of the operation."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or _ERROR_MARK in str(error)
    )


def agree(failure: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Return, on every rank, the failure of the lowest rank that failed; None if none did."""
    if dist.get_world_size() == 1:
        return failure
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    return next((value for value in failures if value is not None), None)


class PartScatter:
    """Sends parts from rank 0 to the ranks that share the data; ranks of one tensor-parallel group get the same part.

    All ranks make one, and call it together.
    """

    def __init__(self, tensor_parallel: int, *, timeout_s: float) -> None:
        ranks, timeout = dist.get_world_size(), timedelta(seconds=timeout_s)
        firsts = range(0, ranks, tensor_parallel)
        self._own_first = dist.get_rank() // tensor_parallel * tensor_parallel
        self._firsts = dist.new_group(list(firsts), timeout=timeout, backend="gloo")
        self._siblings = None
        if tensor_parallel > 1:
            groups = {
                first: dist.new_group(
                    list(range(first, first + tensor_parallel)), timeout=timeout, backend="gloo"
                )
                for first in firsts
            }
            self._siblings = groups[self._own_first]

    def __call__(self, parts: Sequence[T] | BridgeError | None) -> T:
        """Return this rank's part.

        Args:
            parts: On rank 0 one part for each rank that shares the data, or the error that every rank raises instead;
                None on others.
        """
        count = dist.get_world_size(self._firsts)
        to_send: list[Any] | None = None
        if parts is not None:
            to_send = [parts] * count if isinstance(parts, BridgeError) else list(parts)
        part: list[Any] = [to_send[0] if to_send else None]
        if dist.get_rank() == self._own_first and count > 1:
            dist.scatter_object_list(part, to_send, src=0, group=self._firsts)
        if self._siblings is not None:
            dist.broadcast_object_list(part, src=self._own_first, group=self._siblings)
        if isinstance(part[0], BridgeError):
            raise part[0]
        received: T = part[0]
        return received


def gather_state(state: State, *, keep: bool = True, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gather a state dict's tensors, one after the other, into the host's memory. All ranks have to call it.

    A rank without `keep` only takes part in the collectives. With `dtype` None each tensor keeps its own.
    """
    gathered: dict[str, Tensor] = {}
    stack: Tensor | None = None
    for name, value in state.items():
        if isinstance(value, LazySum):
            full = _gather(value.base)
            if keep:
                full = full + value.added(Box.of_shape(full.shape))
        elif isinstance(value, StackItem):
            if value.stack is not stack:  # of many items, which follow each other
                stack = value.stack
                full_stack = _gather(stack.to(dtype or stack.dtype))
            full = full_stack[value.index]
        else:
            full = _gather(value.to(dtype or value.dtype))
        if keep:
            gathered[name] = full.to(dtype or full.dtype).cpu()
    return gathered


def _gather(value: Tensor) -> Tensor:
    return value.full_tensor() if is_dtensor(value) else value


def gather_names(names: Iterable[str]) -> list[str]:
    """Return the names that any rank has, sorted, on every rank."""
    all_names = set(names)
    if dist.is_initialized() and dist.get_world_size() > 1:
        names_by_rank: list[set[str]] = [all_names] * dist.get_world_size()
        dist.all_gather_object(names_by_rank, all_names)
        all_names = all_names.union(*names_by_rank)
    return sorted(all_names)


def _make_store(rank: Rank) -> Any:
    if rank.count == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in __all__
    if rank.rendezvous_file is None:
        raise ValueError(f"expected a rendezvous file for {rank.count} ranks, got none")
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # documented, but not in __all__
    own_host, timeout = own_address(), timedelta(seconds=rank.timeout_s)
    if rank.index == 0:
        store = tcp_store("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        replace_file(rank.rendezvous_file, f"{own_host} {store.port}".encode())
        return store
    deadline = time.monotonic() + rank.timeout_s
    while not rank.rendezvous_file.exists():
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank 0 has written no address to {rank.rendezvous_file}")
        time.sleep(_RENDEZVOUS_POLL_INTERVAL_S)
    host, port = rank.rendezvous_file.read_text().split()
    return tcp_store("localhost" if host == own_host else host, int(port), timeout=timeout)
