"""`scripts/gpu-check`: checks to run first on a new GPU machine (docs/gpus.md)."""
