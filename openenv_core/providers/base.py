"""What a client needs of whatever runs its server."""

from typing import Protocol


class Provider(Protocol):
    """Starts one server and stops it. Both may block, and both are called from threads."""

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its URL. A second call returns the same.

        Raises:
            ProviderError: It could not be started.
        """

    def stop(self) -> None:
        """Stop the server. Idempotent."""
