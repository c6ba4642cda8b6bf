"""The server's side of the shop: the environment, and the app that hosts it."""
