"""Callers that send what they should not, that leave in the middle, and machines that fail."""
