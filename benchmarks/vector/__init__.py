"""The cost of a vector of served environments: `python -m benchmarks.vector`."""
