"""The shop server: the environment and its ASGI app."""
