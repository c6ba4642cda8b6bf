"""The cost of an interpreter for untrusted code: start, execution, memory, and cleanup."""
