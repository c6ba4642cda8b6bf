"""Examples, each to be read from top to bottom."""
