"""Episodes in flight and episodes/s of a rollout worker against one environment server."""
