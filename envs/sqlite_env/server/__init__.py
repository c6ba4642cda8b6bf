"""The SQLite server: the environment and its ASGI app."""
