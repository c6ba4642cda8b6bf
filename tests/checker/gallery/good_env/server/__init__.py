"""The server's side."""
