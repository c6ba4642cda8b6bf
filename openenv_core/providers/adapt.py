"""Providers of the released packages, taken for ours."""

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.providers.base import AnyProvider, Provider, WatchedProvider


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


EXIT_WAIT_S: Final = 0.5
"""How long, in seconds, the end of a process may take to show after its connections broke."""

POLL_INTERVAL_S: Final = 0.02


def adapted(provider: AnyProvider, *, started: bool = False) -> Provider:
    """Return the provider as a client uses it.

    Args:
        provider: Ours, or of a released shape.
        started: Whether its server runs already, so that it has to be stopped and nothing else.

    Raises:
        ConfigurationError: It is none, or wants to be told what to start.
    """
    for start, stop in (("start_container", "stop_container"), ("start", "stop")):
        if callable(getattr(provider, start, None)) and callable(getattr(provider, stop, None)):
            if not started:
                _require_no_arguments(provider, start)
            if start == "start" and not hasattr(provider, "wait_for_ready"):
                return provider
            return _released(provider, start, stop)
    raise ConfigurationError(
        "expected a provider with start() and stop(), or start_container() and stop_container(), "
        f"got {type(provider).__name__}"
    )


def has_died(provider: object, *, within_s: float = EXIT_WAIT_S) -> bool:
    """Return whether the provider's server has died, as far as it can be told, or does so in that many seconds."""
    if not isinstance(provider, WatchedProvider):
        return False
    deadline = time.monotonic() + within_s
    while provider.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def last_words(provider: Provider) -> str:
    """Return what to add to an error if the provider's server has died: that, and its last output.

    One whose deaths show later than `EXIT_WAIT_S` after the connections broke says so in its attribute `death_s`.
    """
    within_s = getattr(provider, "death_s", EXIT_WAIT_S)
    if not has_died(provider, within_s=within_s) or not isinstance(provider, WatchedProvider):
        return ""
    output = provider.output().rstrip()
    return "; the server's process has ended" + (
        f"\n--- the server's last output ---\n{output}" if output else ", and printed nothing"
    )


def _released(provider: Any, start: str, stop: str) -> Released:
    def wait(url: str) -> None:
        if start == "start_container":
            provider.wait_for_ready(url)
        else:
            provider.wait_for_ready()

    return Released(getattr(provider, start), wait, getattr(provider, stop))


def _require_no_arguments(provider: Any, start: str) -> None:
    wanted = [
        name
        for name, parameter in inspect.signature(getattr(provider, start)).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if wanted:
        raise ConfigurationError(
            f"expected {type(provider).__name__}.{start}() to need no arguments, got {', '.join(wanted)}; "
            "start it yourself and pass the URL as base_url beside the provider"
        )
