"""A pool as a client sees it: a provider whose start takes a container, and whose stop gives it back."""

import threading
from collections.abc import Callable
from typing import Any, Generic

from openenv_core.errors import ProviderError
from openenv_core.providers.pool.lease import Lease, MemberT
from openenv_core.providers.stopping import stopped


class PoolProvider(Generic[MemberT]):
    """Takes one container from a pool at a time.

    Args:
        lease: Takes one, within so many seconds, or raises once the event is set.
        timeout_s: Seconds that a container may take to be free.
    """

    def __init__(self, lease: Callable[[float, threading.Event], Lease[MemberT]], timeout_s: float) -> None:
        self._take = lease
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._lease: Lease[MemberT] | None = None

    @property
    def alive(self) -> bool:
        """Whether the container that was taken still runs."""
        lease = self._lease
        if lease is None or lease.closed:
            return False
        alive: Any = getattr(lease.container, "alive", True)
        try:
            return bool(alive() if callable(alive) else alive)
        except ProviderError:
            return True  # an engine that does not answer says nothing of its containers

    def output(self) -> str:
        """Return the last of what the container printed; empty where there is none."""
        lease = self._lease
        logs: Any = getattr(lease.container, "logs", None) if lease is not None and not lease.closed else None
        try:
            return str(logs()) if callable(logs) else ""
        except ProviderError as error:
            return f"[no output: {error}]"

    def start(self) -> str:
        """Take a container, and return its URL. A second call returns the same.

        Raises:
            PoolTimeout: None was free in time.
            PoolError: The pool was closed, or cannot go on.
        """
        with self._lock:
            if self._lease is None:
                self._stopping.clear()
                self._lease = self._take(self._timeout_s, self._stopping)
            return self._lease.url

    def stop(self) -> None:
        """Give the container back. Idempotent. A start that waits in another thread fails then."""
        with stopped(self._stopping.set, self._lock):
            if self._lease is not None:
                self._lease.close()
                self._lease = None
