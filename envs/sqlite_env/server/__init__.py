"""The server's side of the database world: the environment, and the app that hosts it."""
