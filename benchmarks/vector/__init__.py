"""What a vector of served environments costs: `python -m benchmarks.vector`."""
