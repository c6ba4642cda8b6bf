"""The loops, each readable on one page, and what they are run with."""
