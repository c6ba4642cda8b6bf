"""The cost of synchronising weights, from the trainer to a sampling engine: `python -m benchmarks.sync`."""
