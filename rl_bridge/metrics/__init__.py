"""Metrics of a run and their sinks, and how each process spends its time."""
