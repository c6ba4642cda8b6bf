"""The states of a replica, and the budget of its restarts."""

from collections import deque
from enum import StrEnum

from openenv_core.backoff import exponential_pause_s
from rl_bridge.config.monarch import RestartPolicy as RestartPolicy


class ReplicaState(StrEnum):
    """The state of a replica, or of an environment's server."""

    STARTING = "starting"
    SERVING = "serving"
    SUSPECT = "suspect"
    """It serves, but its calls keep failing: they go to other replicas, if any."""
    LOST = "lost"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"
    """It has exhausted its restart budget, or its first start failed."""


class RestartBudget:
    """Counts the restarts of one replica against its policy."""

    def __init__(self, restarts: RestartPolicy) -> None:
        self._restarts = restarts
        self._restart_times: deque[float] = deque(maxlen=restarts.budget)

    def take_restart(self, now: float) -> float | None:
        """Take one restart from the budget: seconds to wait before it, or None if the budget is exhausted."""
        restarts = self._restarts
        while self._restart_times and now - self._restart_times[0] >= restarts.window_s:
            self._restart_times.popleft()
        if len(self._restart_times) >= restarts.budget:
            return None
        self._restart_times.append(now)
        return exponential_pause_s(len(self._restart_times), restarts.backoff_s, restarts.max_backoff_s)
