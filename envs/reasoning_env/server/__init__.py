"""The reasoning server: the environment, on reasoning-gym's data sets and verifiers, and its ASGI app."""
