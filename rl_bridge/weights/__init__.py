"""Versioned, immutable snapshots of a policy's weights, and how they travel."""

from rl_bridge.weights.shared_memory import SharedMemoryPublisher, read_snapshot
from rl_bridge.weights.snapshot import SnapshotHandle, TensorSpec

__all__ = ["SharedMemoryPublisher", "SnapshotHandle", "TensorSpec", "read_snapshot"]
