"""What it costs to move a policy's weights from its trainer to its generators: `python -m benchmarks.weights`."""
