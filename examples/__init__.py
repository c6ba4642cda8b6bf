"""Examples, each read from top to bottom."""
