"""The buffer between rollouts and trainer: waiting groups, their staleness bound, and their layout as arrays."""
