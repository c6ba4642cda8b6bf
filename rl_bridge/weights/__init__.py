"""Versioned, immutable snapshots of a policy's weights, and how they travel."""

from rl_bridge.weights.shared_memory import SharedMemoryPublisher, SnapshotHandle, TensorSpec, read_snapshot
from rl_bridge.weights.slices import Box, ShardSpec
from rl_bridge.weights.store import WeightStore

__all__ = [
    "Box",
    "ShardSpec",
    "SharedMemoryPublisher",
    "SnapshotHandle",
    "TensorSpec",
    "WeightStore",
    "read_snapshot",
]
