"""The trivial environment that the measured servers serve, written for each of them."""
