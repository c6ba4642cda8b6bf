"""One episode: the servers that play in it, the names of their tools, what it may cost, and what happened."""
