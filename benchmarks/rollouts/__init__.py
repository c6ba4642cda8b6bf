"""How many episodes rollout workers keep in flight against one environment server, and how fast they play."""
