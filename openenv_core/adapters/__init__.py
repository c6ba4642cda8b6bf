"""Adapters of served environments to other trainers: one file for each trainer, none loaded by the core."""
