"""From the bytes that ranks have published to the tensors that a reader wants."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_bridge.errors import WeightsError
from rl_bridge.weights.attachments import copy_all
from rl_bridge.weights.snapshot import (
    Box,
    Like,
    ShardSpec,
    Snapshot,
    StoredPart,
    dtensor_box,
    is_dtensor,
    key_text,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Wanted:
    """One tensor as a reader wants it, and where it is to come from.

    Attributes:
        name: Of the tensor.
        box: The part wanted.
        dtype: What it shall be in.
        sources: Ranks and their parts that overlap with it.
    """

    name: str
    box: Box
    dtype: torch.dtype
    sources: Sequence[tuple[int, StoredPart]]

    @property
    def contained(self) -> bool:
        """Whether one published part holds all of it, in the type wanted: a view of that will do."""
        if len(self.sources) != 1:
            return False
        part = self.sources[0][1]
        return part.box.intersection(self.box) == self.box and torch_dtype(part) == self.dtype


def wanted(snapshot: Snapshot, like: Like | None) -> list[Wanted]:
    """Work out what is to be read, and whence.

    Args:
        snapshot: What has been published.
        like: What is wanted, as for `WeightStore.get`; None: every tensor, whole.

    Raises:
        WeightsError: A tensor was not published, is of another shape, or has holes.
    """
    parts = snapshot.parts()
    if like is None:
        return [_whole(snapshot, name, found) for name, found in parts.items()]
    result = []
    for name, model in like.items():
        if name not in parts:
            raise WeightsError(f"expected {name!r} in {key_text(snapshot.key)}, it was not published with it")
        result.append(_like(snapshot, name, parts[name], model))
    return result


def torch_dtype(part: StoredPart) -> torch.dtype:
    """The type of a part's elements."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


def view(data: Tensor, part: StoredPart) -> Tensor:
    """A part as a tensor over the bytes that it lies in."""
    flat = data[part.offset : part.offset + part.nbytes].view(torch_dtype(part))
    return flat.view(part.box.shape)


def copied(wants: Sequence[Wanted], held: Mapping[int, Tensor], like: Like | None) -> dict[str, Tensor]:
    """Copies of what is wanted, on the devices of `like`."""
    state = {}
    for want in wants:
        model = None if like is None else like[want.name]
        device = model.device if isinstance(model, Tensor) else torch.device("cpu")
        state[want.name] = torch.empty(want.box.shape, dtype=want.dtype, device=device)
    copy_all(pair for want in wants for pair in _copies(state[want.name], want, held))
    return state


def seen(
    wants: Sequence[Wanted], held: Mapping[int, Tensor], staging: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What is wanted where it lies; what lies in parts, or in another type, put together in `staging`."""
    state = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for want in wants:
        if want.contained:
            state[want.name] = _contained_view(want, held)
            continue
        kept = staging.get(want.name)
        if kept is None or kept.shape != want.box.shape or kept.dtype != want.dtype:
            kept = staging[want.name] = torch.empty(want.box.shape, dtype=want.dtype)
        copies += _copies(kept, want, held)
        state[want.name] = kept
    copy_all(copies)
    return state


def distributed(state: dict[str, Tensor], like: Like | None) -> dict[str, Tensor]:
    """The tensors, as DTensors where `like` has those."""
    if like is None or not any(is_dtensor(model) for model in like.values()):
        return state
    from torch.distributed.tensor import DTensor

    result = dict(state)
    for name, model in like.items():
        if is_dtensor(model):
            result[name] = DTensor.from_local(
                state[name],
                model.device_mesh,
                model.placements,
                run_check=False,
                shape=model.shape,
                stride=model.stride(),
            )
    return result


def _contained_view(want: Wanted, held: Mapping[int, Tensor]) -> Tensor:
    """What is wanted, without a copy; for what is `contained`."""
    ((rank, part),) = want.sources
    return view(held[rank], part)[want.box.within(part.box)]


def _copies(destination: Tensor, want: Wanted, held: Mapping[int, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """What has to be copied to where, for a tensor of the shape wanted: each overlap from where it lies."""
    for rank, part in want.sources:
        overlap = part.box.intersection(want.box)
        if overlap is not None:
            yield destination[overlap.within(want.box)], view(held[rank], part)[overlap.within(part.box)]


def _whole(snapshot: Snapshot, name: str, found: Sequence[tuple[int, StoredPart]]) -> Wanted:
    part = found[0][1]
    return _want(snapshot, name, Box.whole(part.whole), torch_dtype(part), found)


def _like(
    snapshot: Snapshot, name: str, found: Sequence[tuple[int, StoredPart]], model: Tensor | ShardSpec
) -> Wanted:
    whole = found[0][1].whole
    if isinstance(model, ShardSpec):
        box, dtype = model.box, model.dtype or torch_dtype(found[0][1])
        fits = Box.whole(whole).intersection(box) == box
    else:
        box = dtensor_box(model) if is_dtensor(model) else Box.whole(model.shape)
        dtype, fits = model.dtype, tuple(model.shape) == whole
    if not fits:
        asked = f"{box.shape} from {box.start}" if isinstance(model, ShardSpec) else f"{tuple(model.shape)}"
        raise WeightsError(
            f"expected {name!r} to be asked for within {whole}, as {key_text(snapshot.key)} has it, got {asked}"
        )
    return _want(snapshot, name, box, dtype, found)


def _want(
    snapshot: Snapshot, name: str, box: Box, dtype: torch.dtype, found: Sequence[tuple[int, StoredPart]]
) -> Wanted:
    sources = [(rank, part) for rank, part in found if part.box.intersection(box) is not None]
    covered = sum(overlap.numel for _, part in sources if (overlap := part.box.intersection(box)) is not None)
    if covered != box.numel:
        raise WeightsError(
            f"expected the {box.numel} elements of {name!r} that are wanted once each in {key_text(snapshot.key)}, "
            f"got {covered}; did every rank publish, each its own shards?"
        )
    return Wanted(name=name, box=box, dtype=dtype, sources=sources)
