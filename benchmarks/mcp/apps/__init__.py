"""The measured servers."""
