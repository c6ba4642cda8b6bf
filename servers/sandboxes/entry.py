"""One sandbox of a service, as its table keeps it."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from openenv_core.providers.remote.messages import Sandbox, SandboxState
from servers.sandboxes.backend import SandboxProvider

Start: TypeAlias = str | BaseException | None
"""What comes of a start: where it is, None where it was given up before, or what it failed of."""


@dataclass(slots=True, eq=False)
class Entry:
    """A sandbox. Changes on the service's loop alone; `doomed` is read by threads.

    Attributes:
        id: Its name.
        owner: The name of the token that asked for it.
        provider: What runs it.
        expires: When its lease runs out, in the loop's time.
        state: Where it stands.
        url: Where it is reached, once it runs.
        reason: Why it ended.
        output: The last that it printed, once it has ended.
        settled: It is no longer starting.
        doomed: It is to go, and nothing of it is started any more.
        job: Its start, in a thread.
        starting: What waits for that.
        ending: The removal that is under way.
        again: When a removal that failed is tried again.
    """

    id: str
    owner: str
    provider: SandboxProvider
    expires: float
    state: SandboxState = SandboxState.STARTING
    url: str | None = None
    reason: str | None = None
    output: str = ""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    doomed: bool = False
    job: "Future[Start] | None" = None
    starting: "asyncio.Task[None] | None" = None
    ending: "asyncio.Task[None] | None" = None
    again: float = 0.0

    def told(self, now: float) -> Sandbox:
        """Return what its owner is told."""
        return Sandbox(
            id=self.id,
            state=self.state,
            url=self.url if self.state is SandboxState.RUNNING else None,
            expires_in_s=max(0.0, round(self.expires - now, 3)),
            reason=self.reason,
        )

    def over(self, reason: str, output: str = "") -> None:
        """Note that it has ended; the first reason stands."""
        if self.state is not SandboxState.ENDED:
            self.state, self.reason, self.output = SandboxState.ENDED, reason, output
        self.settled.set()
