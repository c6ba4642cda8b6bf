"""What runs sandboxes: anything that makes a provider out of what a sandbox is to be."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from openenv_core.providers.remote.messages import SandboxSpec


class SandboxProvider(Protocol):
    """What runs one sandbox: a provider that also tells what became of it. All may block, and are called from threads.

    `stop()` makes a `start()` that is under way in another thread fail, or waits for it, and then removes
    whatever it made. It may be called again after it has failed.
    """

    def start(self) -> str:
        """Start the sandbox, wait until its server is healthy, and return its URL."""

    def stop(self) -> None:
        """Remove it, with everything in it."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""

    def output(self) -> str:
        """Return the last lines that it printed."""


Backend: TypeAlias = Callable[[SandboxSpec], SandboxProvider]
"""Makes one for a sandbox that has been admitted. It does not block; it may raise SandboxRefusal."""
