"""The code interpreter server: the environment, the backends that run code, and the ASGI app."""
