"""The BlackJack server: the environment, built on Gymnasium's game, and its ASGI app."""
