"""Servers of the benchmark of vectors, each in a process of its own."""
