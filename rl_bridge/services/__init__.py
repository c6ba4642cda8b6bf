"""Processes of a run, on Monarch."""
