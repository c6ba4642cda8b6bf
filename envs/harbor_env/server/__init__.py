"""The Harbor server: the environment, the machines that tasks run in, and the verifier."""
