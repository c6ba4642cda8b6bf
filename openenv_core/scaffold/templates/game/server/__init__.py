"""The server side of Place Holder: the environment, and the app that serves it."""
