"""The Kuhn poker server: the environment and its ASGI app."""
