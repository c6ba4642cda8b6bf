"""The server's side of BlackJack: the environment on Gymnasium's game, and the app that hosts it."""
