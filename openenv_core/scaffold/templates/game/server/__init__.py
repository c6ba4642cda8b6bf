"""The server's side of Place Holder: the environment, and the app that hosts it."""
