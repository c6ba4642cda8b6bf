"""A server that is looked at as it serves: here, or in a container."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from openenv_core.checker.check import CheckFailed, NotApplicable
from openenv_core.checker.subject import RunningServer, Subject
from openenv_core.checker.watching import containers, hooking
from openenv_core.checker.watching.held import Held, held
from openenv_core.targets import TargetKind

SETTLE_S: Final = 0.1
"""Pause between two looks at what is held; two that are alike count."""

SETTLED_S: Final = 2.0
"""Seconds after which the last look counts, whatever it was."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A server of one's own, and how it is looked at.

    Attributes:
        server: The server.
        collect: Has its processes throw their garbage away.
        held: Looks at what they hold.
    """

    server: RunningServer
    collect: Callable[[], None]
    held: Callable[[], Held]

    def settled(self) -> Held:
        """Look at what the server holds, once what has ended is gone."""
        deadline = time.monotonic() + SETTLED_S
        time.sleep(SETTLE_S)  # the last sessions are being closed
        self.collect()
        first = self.held()
        while time.monotonic() < deadline:
            time.sleep(SETTLE_S)
            second = self.held()
            if second.things == first.things:
                return second
            first = second
        return first


@contextmanager
def watching(subject: Subject) -> Iterator[Watched]:
    """Start a server that can be looked at.

    Raises:
        NotApplicable: What it holds cannot be seen from here.
    """
    if subject.kind is TargetKind.URL:
        raise NotApplicable("what a server at a URL holds cannot be seen from here")
    if subject.kind is TargetKind.IMAGE:
        with _in_container(subject) as server:
            yield Watched(server, partial(containers.collect, server), partial(containers.held, server))
        return
    with ExitStack() as stack:
        folder, env_vars = stack.enter_context(hooking.hooked())
        env_vars.update(hooking.collecting(folder))
        server = stack.enter_context(subject.server(env_vars=env_vars))
        yield Watched(server, partial(hooking.collect, server, folder), partial(held, server))


@contextmanager
def _in_container(subject: Subject) -> Iterator[RunningServer]:
    assert subject.url  # a container that does not start by itself is another check's to tell
    options = containers.options_for(subject.target.text)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(subject.server(docker_options=options))
        except CheckFailed as error:
            raise NotApplicable(
                f"the image starts, but not so that it can be looked into: {error}"
            ) from error
        yield server
