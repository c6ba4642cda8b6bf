"""The server of a PettingZoo environment: the environment and its ASGI app."""
