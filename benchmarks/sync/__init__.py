"""What a synchronisation of weights costs, up to an engine that samples from them: `python -m benchmarks.sync`."""
