"""Versioned, immutable snapshots of a policy's weights, and their transports."""

from rl_bridge.weights.snapshot import Box, ShardSpec
from rl_bridge.weights.store import WeightStore

__all__ = ["Box", "ShardSpec", "WeightStore"]
