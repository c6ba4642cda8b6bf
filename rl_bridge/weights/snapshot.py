"""What a snapshot is, apart from how it travels."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl_bridge.types import PolicyVersion

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes: a cache line."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """Where one tensor lies in a segment.

    Attributes:
        shape: As of `torch.Tensor.shape`.
        dtype: The name within torch, for example `float32`.
        offset: First byte.
        nbytes: Length in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class SnapshotHandle:
    """Names one published version. Small and picklable: it is what travels between actors.

    Attributes:
        version: Of the weights.
        generation: The segment's generation number when the snapshot was complete; tells a reader that came
            too late that the segment now holds something else.
        pid: The publisher's process.
        fd: The segment's file descriptor in that process.
        nbytes: Size of the segment.
        tensors: What lies where.
    """

    version: PolicyVersion
    generation: int
    pid: int
    fd: int
    nbytes: int
    tensors: Mapping[str, TensorSpec]


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
