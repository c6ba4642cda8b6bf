"""Services on Monarch: replicas of an actor, routed to, fanned out to, restarted."""
