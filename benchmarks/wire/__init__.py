"""The cost of one step over the wire: the released server, the floor of the stack, and ours.

`python -m benchmarks.wire --help` shows how to run it; docs/performance.md has results.
"""
