"""Checks of a host before a run: packages, devices, and collectives with other hosts."""
