"""What a snapshot is, apart from how it travels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rl_bridge.types import PolicyVersion
from rl_bridge.weights.slices import Box, Shard

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes: a cache line."""

Key: TypeAlias = PolicyVersion | str
"""What a snapshot is called: a version of the policy, or a name of one's own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredPart:
    """Where one rank's part of one tensor lies in its segment.

    Attributes:
        whole: Shape of the whole tensor.
        box: The part.
        dtype: The name within torch, for example `float32`.
        offset: First byte.
        nbytes: Length in bytes.
    """

    whole: tuple[int, ...]
    box: Box
    dtype: str
    offset: int
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Publication:
    """Tells one publishing of a key from another of the same key, the same on every rank.

    Attributes:
        group: The publishers that publish together; publishers that were started anew are another group.
        number: How often this group has published the key, this time included.
    """

    group: str
    number: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Origin:
    """The process that publishes.

    Attributes:
        machine: Where its number means something.
        pid: Its number.
        started: When it was started, as in /proc, so that a number that is used again is told apart.
        rank: Its rank among those that publish.
    """

    machine: str
    pid: int
    started: int
    rank: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Contribution:
    """What one rank has published of a snapshot. Small and picklable, as all of this module.

    Attributes:
        origin: The process.
        location: Where its segment is; the transport knows what to make of it. None where the rank had
            nothing of its own to publish.
        parts: What lies where in the segment.
    """

    origin: Origin
    location: object
    parts: Mapping[str, StoredPart]


@dataclass(kw_only=True, slots=True, frozen=True)
class Snapshot:
    """A snapshot that every rank has published its part of.

    Attributes:
        key: What it is called.
        publication: Which publishing of the key.
        contributions: One a rank, in their order.
    """

    key: Key
    publication: Publication
    contributions: Sequence[Contribution]

    def parts(self) -> dict[str, list[tuple[int, StoredPart]]]:
        """The parts of each tensor, each with the rank that published it."""
        found: dict[str, list[tuple[int, StoredPart]]] = {}
        for rank, contribution in enumerate(self.contributions):
            for name, part in contribution.parts.items():
                found.setdefault(name, []).append((rank, part))
        return found


def told(key: Key) -> str:
    """A key as messages name it."""
    return repr(key) if isinstance(key, str) else f"version {key}"


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def layout(shards: Mapping[str, Shard], *, header: int) -> tuple[dict[str, StoredPart], int]:
    """Lay shards out one after another.

    Args:
        shards: What is to be stored.
        header: Bytes to leave free in front.

    Returns:
        What lies where, and how many bytes that takes.
    """
    parts: dict[str, StoredPart] = {}
    offset = header
    for name, shard in shards.items():
        nbytes = shard.local.numel() * shard.local.element_size()
        parts[name] = StoredPart(
            whole=shard.whole,
            box=shard.box,
            dtype=str(shard.local.dtype).removeprefix("torch."),
            offset=offset,
            nbytes=nbytes,
        )
        offset = aligned(offset + nbytes)
    return parts, offset
