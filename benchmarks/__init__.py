"""Benchmarks, each a command that is run by hand."""
