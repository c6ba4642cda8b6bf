"""The check that a server does not leak resources over many episodes."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.playing import draw_actions, expect_answer
from openenv_core.checker.subject import Client, Subject
from openenv_core.checker.watching import WatchedServer, watch_server
from openenv_core.errors import ExecutionError, ValidationFailedError

_BYTES_AN_EPISODE: Final = 512.0
"""Memory growth per episode below this cannot be told from allocator noise. One of our servers without a leak grows by
less than 100 in windows of a hundred episodes."""

_BYTES_IN_ALL: Final = 32 * 1024
"""Total growth below this is only a few pages."""

_MIN_GROWTH: Final = 3
"""Minimum growth in threads or files that counts as a leak."""

_RISING: Final = 0.6
"""Share of windows that have to end higher than the previous one for memory growth to be steady."""

_PLAY_BUDGET_S: Final = 240.0
"""Seconds of play; a slow environment is judged by the episodes played in that time."""

_WINDOWS: Final = 10
_WARM_UP: Final = 3
"""Windows that are not counted."""

_LEAST: Final = 40
"""Minimum number of episodes for a verdict."""

_PACE_EPISODES: Final = 2
"""Episodes to measure the pace: one in the lasting session, one in a new session."""

_STEPS: Final = 20
"""Steps after which an episode is aborted, because leaks do not depend on its end."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Usage of a resource over the windows.

    Attributes:
        values: Usage at the end of each window after the warm-up.
        episodes: Episodes per window.
    """

    values: tuple[int, ...]
    episodes: int

    @property
    def count(self) -> int:
        """The number of episodes between the first and the last value."""
        return self.episodes * (len(self.values) - 1)

    @property
    def total(self) -> int:
        """The difference between the last and the first value."""
        return self.values[-1] - self.values[0]

    @property
    def slope(self) -> float:
        """The growth per episode: the median slope over all pairs of windows."""
        pairs = combinations(enumerate(self.values), 2)
        slopes = [(high - low) / (later - earlier) for (earlier, low), (later, high) in pairs]
        return statistics.median(slopes) / self.episodes

    @property
    def rising_share(self) -> float:
        """The share of windows that end higher than the previous one."""
        steps = [high > low for low, high in zip(self.values, self.values[1:], strict=False)]
        return sum(steps) / len(steps)


def leaks_memory(growth: Growth) -> bool:
    """Return whether memory grows steadily, and by more than allocator noise."""
    return (
        growth.slope > _BYTES_AN_EPISODE and growth.total > _BYTES_IN_ALL and growth.rising_share >= _RISING
    )


def leaks_resources(growth: Growth) -> bool:
    """Return whether threads or files grow; without a leak they do not, so a few are enough."""
    return growth.total >= _MIN_GROWTH and growth.slope > 0


def _measure(subject: Subject) -> dict[str, Growth]:
    """Play the episodes and return the growth of each resource; NotApplicableError if they are too few for a verdict.

    If a resource seems to leak, as many episodes are played again, and only these count. A slow environment plays fewer
    episodes per window, so that all windows fit into the time.
    """
    if subject.limits.episodes < _LEAST:
        raise NotApplicableError(
            f"{subject.limits.episodes} episodes are too few for a verdict; raise --episodes to {_LEAST} or more"
        )
    with ExitStack() as stack:
        watched = stack.enter_context(watch_server(subject))
        stack.enter_context(expect_answer("episodes"))
        client = stack.enter_context(subject.client(watched.server.url))
        player = _Episodes(subject, watched, client)
        max_episodes = int(_PLAY_BUDGET_S / _WINDOWS / player.measure_pace())
        episodes = max(1, min(subject.limits.episodes // _WINDOWS, max_episodes))
        windows = list(player.windows(episodes, _WINDOWS))[_WARM_UP:]
        if len(windows) > 1 and _find_leaks(_growths(windows, episodes)):
            more_windows = list(player.windows(episodes, _WINDOWS - _WARM_UP))
            windows = more_windows if len(more_windows) > 1 else windows
    if len(windows) < 2 or episodes * _WINDOWS < _LEAST:
        raise NotApplicableError(
            f"too few episodes for a verdict: {episodes} in each of {len(windows)} windows, within "
            f"{_PLAY_BUDGET_S:g} s"
        )
    return _growths(windows, episodes)


def _growths(windows: Sequence[dict[str, int]], episodes: int) -> dict[str, Growth]:
    return {name: Growth(tuple(window[name] for window in windows), episodes) for name in _ADVICE}


def _find_leaks(growths: dict[str, Growth]) -> list[str]:
    return [
        name
        for name, growth in growths.items()
        if (leaks_memory if name == "memory" else leaks_resources)(growth)
    ]


class _Episodes:
    """Plays episodes, half of them in one lasting session and half in new sessions."""

    def __init__(self, subject: Subject, watched: WatchedServer, long_client: Client) -> None:
        self._subject = subject
        self._server = watched
        self._long_client = long_client
        self._single_session = subject.cap == 1
        self._episode_count = 0
        self._deadline = time.monotonic() + _PLAY_BUDGET_S
        self._actions = [draw_actions(subject, number)[:_STEPS] for number in range(16)]

    def measure_pace(self) -> float:
        """Play an episode of each kind; return the average seconds per episode."""
        started = time.monotonic()
        for _ in range(_PACE_EPISODES):
            self._play_next()
        return (time.monotonic() - started) / _PACE_EPISODES

    def windows(self, episodes: int, count: int) -> Iterator[dict[str, int]]:
        """Play windows of episodes, at most as long as time is left; yield the server's usage after each."""
        for _ in range(count):
            for _ in range(episodes):
                self._play_next()
            yield self._server.measure_stable()
            if time.monotonic() > self._deadline:
                return

    def _play_next(self) -> None:
        number = self._episode_count
        self._episode_count += 1
        if number % 2 or self._single_session:
            if self._single_session and number % 2:
                self._long_client.disconnect()
            self._play(self._long_client, number)
        else:
            with self._subject.client(self._server.server.url) as client:
                self._play(client, number)

    def _play(self, client: Client, number: int) -> None:
        client.reset(seed=self._subject.limits.seed + number)
        for action in self._actions[number % len(self._actions)]:
            with suppress(ValidationFailedError, ExecutionError):
                if client.step(action).done:
                    return


_ADVICE: Final = {
    "processes": "in close(), end every process that __init__ or reset has started",
    "threads": "in close(), end every thread and pool that __init__ or reset has started",
    "files": "open files and sockets in `with`, or close them in reset and in close()",
    "memory": "keep nothing of an episode once it is over: look for lists, dicts and caches on the class or in the "
    "module that only ever grow, and bound them (functools.lru_cache(maxsize=), deque(maxlen=)). A bounded cache stops "
    "growing once it is full: raise --episodes to see whether it does",
}
"""What to change for each resource that grows. A leak of the first ones makes the later ones grow too."""


@check(CheckLevel.LOAD, deadline_s=900.0)
def check_resources_stay_level(subject: Subject) -> str:
    """The server has no more processes, threads, files and memory after a thousand episodes than after the first."""
    growths = _measure(subject)
    leaking = _find_leaks(growths)
    if leaking:
        name, growth = leaking[0], growths[leaking[0]]
        raise CheckError(
            f"expected as many {name}{' (bytes)' if name == 'memory' else ''} after {growth.count} episodes as before "
            f"them, got {growth.values[0]} before and {growth.values[-1]} after, {growth.slope:.3g} for each",
            change=_ADVICE[name],
        )
    return f"{growths['memory'].count} episodes"
