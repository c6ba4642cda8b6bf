"""Served environments in the terms of others' trainers: a file a trainer, none of them loaded by the core."""
