"""How long a worker waits for an environment."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class SessionDeadlines:
    """Every wait for an environment, in seconds.

    Attributes:
        free_s: Until a session is free: one of those that the worker may have, and again one of those that the servers
            have room for.
        connect_s: Until a session is open, all attempts and pauses together, where no server can be reached.
        reset_s: Until an episode has begun.
        step_s: Until a step has been taken.
    """

    free_s: float = 600.0
    connect_s: float = 60.0
    reset_s: float = 60.0
    step_s: float = 30.0
