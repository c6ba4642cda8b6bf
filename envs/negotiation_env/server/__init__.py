"""The negotiation server: the environment and its ASGI app."""
