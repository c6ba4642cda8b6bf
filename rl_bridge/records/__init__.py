"""Rollouts kept to be read: a bounded, sampled part of what a run was trained on, in its folder."""
