"""What somebody with a fresh GPU machine runs first: `scripts/gpu-check` (docs/gpus.md)."""
