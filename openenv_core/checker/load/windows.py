"""Plays episodes in windows of equal size, and looks at what the server holds after each."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, TypeAlias

from openenv_core.checker.check import NotApplicable
from openenv_core.checker.load.growth import Growth, leaks_memory, leaks_things
from openenv_core.checker.playing.compared import answered, some_actions
from openenv_core.checker.subject import Client, RunningServer, Subject
from openenv_core.checker.watching.held import Held, held
from openenv_core.checker.watching.hooking import collect, collecting, hooked
from openenv_core.errors import ExecutionFailed, ValidationFailed
from openenv_core.targets import TargetKind

BUDGET_S: Final = 240.0
"""Seconds of playing; an environment that is too slow for all the episodes is judged by those that there were."""

WINDOWS: Final = 10
WARM_UP: Final = 3
"""Windows that are played before any counts."""

LEAST: Final = 40
"""Episodes without which nothing can be said."""

STEPS: Final = 20
"""Steps after which an episode is broken off; what an episode leaves does not wait for its end."""

SETTLE_S: Final = 0.1
"""Pause between two looks at what is held; two that are alike count."""

SETTLED_S: Final = 2.0
"""Seconds after which the last look counts, whatever it was."""

Windows: TypeAlias = tuple[int, list[Held]]
"""The episodes of a window, and what was held after each."""


def measured(subject: Subject) -> Windows:
    """Play the episodes; where something seems to grow, as many again, and these alone count."""
    if subject.kind is TargetKind.URL:
        raise NotApplicable("what a server at a URL holds cannot be seen from here")
    episodes = max(1, subject.limits.episodes // WINDOWS)
    with ExitStack() as stack:
        folder, env_vars = stack.enter_context(hooked())
        server = stack.enter_context(subject.server(env_vars={**env_vars, **collecting(folder)}))
        server.pids()  # raises where they cannot be seen
        stack.enter_context(answered("episodes"))
        client = stack.enter_context(subject.client(server.url))
        player = _Episodes(subject, server, client, folder)
        windows = list(player.windows(episodes, WINDOWS))[WARM_UP:]
        if _suspicious(windows, episodes):
            again = list(player.windows(episodes, WINDOWS - WARM_UP))
            windows = again if len(again) > 1 else windows
    if len(windows) < 2 or episodes * WINDOWS < LEAST:
        raise NotApplicable(
            f"too few episodes to tell: {episodes} in each of {len(windows)} windows; --episodes takes more"
        )
    return episodes, windows


def _suspicious(windows: Sequence[Held], episodes: int) -> bool:
    if len(windows) < 2:
        return False
    growths = {
        name: Growth(tuple(getattr(one, name) for one in windows), episodes)
        for name in ("memory", "threads", "files", "processes")
    }
    return leaks_memory(growths.pop("memory")) or any(leaks_things(growth) for growth in growths.values())


class _Episodes:
    """Plays episodes, half of them in one lasting session and half in sessions of their own."""

    def __init__(self, subject: Subject, server: RunningServer, lasting: Client, folder: Path) -> None:
        self._subject = subject
        self._server = server
        self._lasting = lasting
        self._folder = folder
        self._alone = subject.cap == 1
        self._played = 0
        self._until = time.monotonic() + BUDGET_S
        self._actions = [some_actions(subject, number)[:STEPS] for number in range(16)]

    def windows(self, episodes: int, count: int) -> Iterator[Held]:
        """Play so many windows, or as many as there is time for; yield what the server holds after each."""
        for _ in range(count):
            for _ in range(episodes):
                self._one()
            yield self._held()
            if time.monotonic() > self._until:
                return

    def _one(self) -> None:
        number = self._played
        self._played += 1
        if number % 2 or self._alone:
            if self._alone and number % 2:
                self._lasting.disconnect()
            self._play(self._lasting, number)
        else:
            with self._subject.client(self._server.url) as client:
                self._play(client, number)

    def _play(self, client: Client, number: int) -> None:
        self._subject.reset(client, seed=self._subject.limits.seed + number)
        for action in self._actions[number % len(self._actions)]:
            with suppress(ValidationFailed, ExecutionFailed):
                if client.step(action).done:
                    return

    def _held(self) -> Held:
        """Look at what the server holds, once what has ended is gone."""
        deadline = time.monotonic() + SETTLED_S
        time.sleep(SETTLE_S)  # the last sessions are being closed
        collect(self._server, self._folder)
        first = held(self._server)
        while time.monotonic() < deadline:
            time.sleep(SETTLE_S)
            second = held(self._server)
            if (second.threads, second.files, second.processes) == (
                first.threads,
                first.files,
                first.processes,
            ):
                return second
            first = second
        return first
