"""What a client needs of whatever runs its server."""

from typing import Any, Protocol, TypeAlias, runtime_checkable


class Provider(Protocol):
    """Starts one server and stops it. Both may block, and both are called from threads."""

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its URL. A second call returns the same.

        Raises:
            ProviderError: It could not be started.
        """

    def stop(self) -> None:
        """Stop the server. Idempotent."""


@runtime_checkable
class Watched(Protocol):
    """A provider that can also tell what became of its server."""

    @property
    def alive(self) -> bool:
        """Whether the server that was started still runs."""

    def output(self) -> str:
        """Return the last lines that the server printed."""


AnyProvider: TypeAlias = Provider | Any
"""A `Provider`, or an object of either shape that released packages have:

- `start()` and `stop()`, with a `wait_for_ready()` that is called after the start if there is one;
- `start_container()`, `stop_container()` and `wait_for_ready(base_url)`.

It must know by itself what to start: nothing is passed to its start.
"""
