"""Plays any environment from a terminal, with only its server's JSON schemas."""
