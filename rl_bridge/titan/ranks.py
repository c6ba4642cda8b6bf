"""The ranks that train one model together: how they find each other, and how one's death ends the others' waits."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_bridge.errors import RankLostError
from rl_bridge.weights.snapshot import Box, LazySum, State

DEFAULT_TIMEOUT_S = 600.0
# gloo and the meeting's file raise plain RuntimeErrors.
_MARKS = ("gloo", "Wait timeout")


@dataclass(kw_only=True, slots=True, frozen=True)
class Rank:
    """One rank among those that train together.

    Attributes:
        meeting: The file by which they find each other, in a folder that all of them see. It is of one attempt alone: a
            restarted trainer meets elsewhere. None for a rank that is alone.
        timeout_s: How long a rank waits for the others, when they meet and in each collective.
    """

    index: int = 0
    count: int = 1
    meeting: Path | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


ALONE = Rank()


def join_process_group(device: torch.device, rank: Rank = ALONE) -> None:
    """Make this process one of a group, unless it belongs to a group already.

    RankLostError where the others do not come. Nothing listens on a port that is known beforehand: ranks tell each
    other in the meeting's file where they are.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with siblings_needed("when the ranks met"):
        dist.init_process_group(
            backend,
            store=_store(rank),
            rank=rank.index,
            world_size=rank.count,
            timeout=timedelta(seconds=rank.timeout_s),
        )


def limit_waits(timeout_s: float) -> None:
    """Have all groups that there are wait so long: those of some of the ranks do not inherit the time-out of all."""
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) != "fake":  # of one rank
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextlib.contextmanager
def siblings_needed(expectation: str) -> Iterator[None]:
    """Around collectives: what they raise when a sibling is gone or late becomes `RankLostError`.

    The group cannot be used afterwards: the rank has to end, and the whole trainer to be started anew.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_siblings(error):
            raise
        raise RankLostError(
            f"expected every rank of the trainer {expectation}, one is gone or was late: {error}; "
            "the trainer goes on from its last checkpoint once all its ranks are started anew"
        ) from error


def is_of_siblings(error: BaseException) -> bool:
    """Whether an error says that a collective failed, and nothing about what it was for."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(mark in str(error) for mark in _MARKS)
    )


def agree(failure: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The first failure that any rank met, on every rank; None where all is well."""
    if dist.get_world_size() == 1:
        return failure
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    return next((value for value in failures if value is not None), None)


def gather_state(state: State, *, keep: bool = True, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A state dict's tensors, whole and in the host's memory, one after the other. All ranks have to ask.

    A rank that does not `keep` them only helps others to have them. `dtype` None leaves each its own.
    """
    # Takes a second to import, which those that gather nothing need not wait for.
    from torch.distributed.tensor import DTensor

    gathered: dict[str, Tensor] = {}
    for name, value in state.items():
        base = value.base if isinstance(value, LazySum) else value.to(dtype or value.dtype)
        whole = base.full_tensor() if isinstance(base, DTensor) else base
        if keep:
            if isinstance(value, LazySum):
                whole = whole + value.added(Box.whole(whole.shape))
            gathered[name] = whole.to(dtype or whole.dtype).cpu()
    return gathered


def union(names: Iterable[str]) -> list[str]:
    """The names that any rank has, sorted, on every rank."""
    own = set(names)
    if dist.is_initialized() and dist.get_world_size() > 1:
        known: list[set[str]] = [own] * dist.get_world_size()
        dist.all_gather_object(known, own)
        own = own.union(*known)
    return sorted(own)


def _store(rank: Rank) -> Any:
    if rank.count == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in __all__
    if rank.meeting is None:
        raise ValueError(f"expected a meeting's file for {rank.count} ranks, got none")
    return dist.FileStore(str(rank.meeting), rank.count)  # type: ignore[attr-defined]
