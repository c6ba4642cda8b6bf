"""Plays any environment in a terminal, based only on its server's JSON schemas."""
