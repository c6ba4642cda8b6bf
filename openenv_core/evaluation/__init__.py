"""Policies played in served environments, and what that comes to; nothing here needs torch."""
