"""A provider as released packages have it: one call starts, another waits, and a third stops."""

import threading
from collections.abc import Callable

from openenv_core.errors import ProviderError


class Released:
    """A `Provider` over these three calls, for one client: once it has been stopped, it does not start again.

    A start goes on in its thread when the client that waits for it is cancelled. The stop that follows may come
    before there is anything to stop, so the start looks for it, and stops what it has made.

    Args:
        start: Starts a server and returns its URL.
        wait: Returns when the server at that URL is ready.
        stop: Stops the server, if there is one.
    """

    def __init__(
        self, start: Callable[[], object], wait: Callable[[str], object], stop: Callable[[], object]
    ) -> None:
        self._calls = start, wait
        self._end = stop
        self._starting = threading.Lock()
        self._ending = threading.Lock()
        self._stopped = False
        self._url: str | None = None

    def start(self) -> str:
        """Start the server and wait until it is ready.

        Raises:
            ProviderError: It was stopped, before or meanwhile.
        """
        begin, wait = self._calls
        with self._starting:
            self._require_wanted()
            if self._url is None:
                url = str(begin())
                try:
                    self._require_wanted()
                    wait(url)
                    self._require_wanted()
                except BaseException:
                    self._stop()
                    raise
                self._url = url
            return self._url

    def stop(self) -> None:
        """Stop the server. A start that is under way in another thread stops it too, as soon as there is one."""
        self._stopped = True
        self._stop()

    def _stop(self) -> None:
        with self._ending:
            self._end()

    def _require_wanted(self) -> None:
        if self._stopped:
            raise ProviderError("expected to start a server, but the client was closed; make a new client")
