"""How a service is asked for: its size, name, environment, and how often it is started again."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class RestartPolicy:
    """What a service does about replicas that are lost.

    Attributes:
        budget: Restarts that one replica may need within the window; one more ends the run. 0 makes every loss
            final.
        window_s: Seconds over which restarts are counted.
        backoff_s: Seconds to wait before a restart; doubled with every further one within the window.
        max_backoff_s: Seconds that the wait never exceeds.
    """

    budget: int = 3
    window_s: float = 600.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"expected a budget of at least 0 restarts, got {self.budget}")
        if self.window_s <= 0:
            raise ValueError(f"expected a window of more than 0 s, got {self.window_s:g}")
        if not 0 <= self.backoff_s <= self.max_backoff_s:
            raise ValueError(
                "expected 0 <= backoff_s <= max_backoff_s, "
                f"got backoff_s={self.backoff_s:g} and max_backoff_s={self.max_backoff_s:g}"
            )


class RestartBudget:
    """Counts the restarts of one replica against its policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._spent: deque[float] = deque(maxlen=policy.budget)

    def spend(self, now: float) -> float | None:
        """Take one restart from the budget.

        Args:
            now: Seconds on any clock that only goes forward.

        Returns:
            Seconds to wait before the restart, or None where the budget is gone.
        """
        policy = self._policy
        while self._spent and now - self._spent[0] >= policy.window_s:
            self._spent.popleft()
        if len(self._spent) >= policy.budget:
            return None
        # Bounded before it is taken as an exponent: a float ends at two to the 1023.
        doublings = min(len(self._spent), 64)
        self._spent.append(now)
        return min(policy.backoff_s * 2.0**doublings, policy.max_backoff_s)


@dataclass(kw_only=True, slots=True, frozen=True)
class ServiceOptions:
    """What a service consists of.

    Attributes:
        procs: Processes of a replica on each of its hosts.
        hosts: Hosts of a replica.
        with_gpus: Each process gets one GPU of its host; without, none is visible to it.
        num_replicas: Replicas to begin with.
        name: Names the service, its processes and its logs; the actor's class otherwise.
        environment: Variables the processes start with, beside the controller's.
        restarts: What is done about lost replicas.
        start_timeout_s: Seconds a replica may take from its process to its first call; also how long a call
            waits while no replica serves.
    """

    procs: int = 1
    hosts: int = 1
    with_gpus: bool = False
    num_replicas: int = 1
    name: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: RestartPolicy = RestartPolicy()
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for key in ("procs", "hosts", "num_replicas"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} to be at least 1, got {getattr(self, key)}")
        if self.start_timeout_s <= 0:
            raise ValueError(f"expected start_timeout_s to be more than 0 s, got {self.start_timeout_s:g}")


class ByRank(list[Any]):
    """An argument of which each rank of a replica gets its own, in the order of their ranks."""


def own_argument(argument: object, rank: int) -> object:
    """What a rank gets of an argument."""
    return argument[rank] if isinstance(argument, ByRank) else argument
