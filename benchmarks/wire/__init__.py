"""What one step over the wire costs: the released server, the floor of the stack, and ours.

`python -m benchmarks.wire --help` tells how to run it; docs/performance.md holds a run's figures.
"""
