"""Stepping any environment from a terminal: nothing is known of it but its server's JSON schemas."""
