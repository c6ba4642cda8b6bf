"""The cost of moving a policy's weights from trainer to generator: `python -m benchmarks.weights`."""
