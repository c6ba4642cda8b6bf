"""Who may come in, and how much they may bring: what is checked of a connection before anything else."""

from servers.security.guard import Guard

__all__ = ["Guard"]
