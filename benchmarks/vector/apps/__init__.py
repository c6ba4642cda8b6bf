"""The servers of the vector benchmark."""
