"""Between rollouts and trainer: what waits, how old it may be, and how it is laid out as arrays."""
