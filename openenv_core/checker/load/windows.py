"""Plays episodes in windows of equal size, and looks at what the server holds after each."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Final, TypeAlias

from openenv_core.checker.check import NotApplicable
from openenv_core.checker.load.growth import Growth, leaks_memory, leaks_things
from openenv_core.checker.playing.compared import answered, some_actions
from openenv_core.checker.subject import Client, Subject
from openenv_core.checker.watching.held import Held
from openenv_core.checker.watching.watched import Watched, watching
from openenv_core.errors import ExecutionFailed, ValidationFailed

BUDGET_S: Final = 240.0
"""Seconds of playing; an environment that is too slow for all the episodes is judged by those that there were."""

WINDOWS: Final = 10
WARM_UP: Final = 3
"""Windows that are played before any counts."""

LEAST: Final = 40
"""Episodes without which nothing can be said."""

PACED: Final = 2
"""Episodes by which the pace is told: one in the lasting session, one in a session of its own."""

STEPS: Final = 20
"""Steps after which an episode is broken off; what an episode leaves does not wait for its end."""

Windows: TypeAlias = tuple[int, list[Held]]
"""The episodes of a window, and what was held after each."""


def measured(subject: Subject) -> Windows:
    """Play the episodes; where something seems to grow, as many again, and these alone count.

    A slow environment has fewer episodes in each window, so that all windows fit the time there is.
    """
    with ExitStack() as stack:
        watched = stack.enter_context(watching(subject))
        stack.enter_context(answered("episodes"))
        client = stack.enter_context(subject.client(watched.server.url))
        player = _Episodes(subject, watched, client)
        episodes = max(1, min(subject.limits.episodes // WINDOWS, int(BUDGET_S / WINDOWS / player.pace())))
        windows = list(player.windows(episodes, WINDOWS))[WARM_UP:]
        if _suspicious(windows, episodes):
            again = list(player.windows(episodes, WINDOWS - WARM_UP))
            windows = again if len(again) > 1 else windows
    if len(windows) < 2 or episodes * WINDOWS < LEAST:
        raise NotApplicable(
            f"too few episodes to tell: {episodes} in each of {len(windows)} windows, in the {BUDGET_S:g} s that "
            "they may take; --episodes takes more"
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

    def __init__(self, subject: Subject, watched: Watched, lasting: Client) -> None:
        self._subject = subject
        self._watched = watched
        self._lasting = lasting
        self._alone = subject.cap == 1
        self._played = 0
        self._until = time.monotonic() + BUDGET_S
        self._actions = [some_actions(subject, number)[:STEPS] for number in range(16)]

    def pace(self) -> float:
        """Play an episode of each kind; return the seconds that one took."""
        started = time.monotonic()
        for _ in range(PACED):
            self._one()
        return (time.monotonic() - started) / PACED

    def windows(self, episodes: int, count: int) -> Iterator[Held]:
        """Play so many windows, or as many as there is time for; yield what the server holds after each."""
        for _ in range(count):
            for _ in range(episodes):
                self._one()
            yield self._watched.settled()
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
            with self._subject.client(self._watched.server.url) as client:
                self._play(client, number)

    def _play(self, client: Client, number: int) -> None:
        self._subject.reset(client, seed=self._subject.limits.seed + number)
        for action in self._actions[number % len(self._actions)]:
            with suppress(ValidationFailed, ExecutionFailed):
                if client.step(action).done:
                    return
