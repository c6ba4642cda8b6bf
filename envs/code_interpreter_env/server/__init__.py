"""The server's side of the code interpreter: the environment, where its code runs, and the app that hosts both."""
