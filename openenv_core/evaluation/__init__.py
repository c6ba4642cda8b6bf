"""Evaluates policies in served environments; does not need torch."""
