"""Plays policies in served environments and computes statistics of their rewards; does not need torch."""
