"""Services on Monarch: replicas of an actor with routing, fan-out and restarts."""
