"""The check that a server does not leak resources over many episodes."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import combinations, count, islice
from typing import Any, Final

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.playing import draw_actions, expect_answer
from openenv_core.checker.subject import Client, Subject
from openenv_core.checker.watching import watch_server
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
    with (
        watch_server(subject) as watched,
        expect_answer("episodes"),
        subject.client(watched.server.url) as lasting,
    ):
        actions = [draw_actions(subject, number)[:_STEPS] for number in range(16)]
        played = _play_episodes(subject, lasting, str(watched.server.url), actions)
        started = time.monotonic()
        deadline = started + _PLAY_BUDGET_S
        next(played)
        next(played)  # one in the lasting session, one in a new session
        pace_s = (time.monotonic() - started) / 2
        episodes = max(1, min(subject.limits.episodes // _WINDOWS, int(_PLAY_BUDGET_S / _WINDOWS / pace_s)))

        def measure_windows(wanted: int) -> list[dict[str, int]]:
            windows: list[dict[str, int]] = []
            while len(windows) < wanted and (not windows or time.monotonic() < deadline):
                for _ in islice(played, episodes):
                    pass
                windows.append(watched.measure_stable())
            return windows

        windows = measure_windows(_WINDOWS)[_WARM_UP:]
        if len(windows) > 1 and _find_leaks(_growths(windows, episodes)):
            more_windows = measure_windows(_WINDOWS - _WARM_UP)
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


def _play_episodes(
    subject: Subject, lasting: Client, url: str, actions: Sequence[Sequence[dict[str, Any]]]
) -> Iterator[None]:
    """Play an episode for each item: half of them in one lasting session, and half in new sessions."""
    for number in count():
        if subject.cap == 1 and number % 2:  # there is one place: it ends for every second episode
            lasting.disconnect()
        is_lasting = subject.cap == 1 or number % 2
        session: AbstractContextManager[Client] = nullcontext(lasting) if is_lasting else subject.client(url)
        with session as client:
            client.reset(seed=subject.limits.seed + number)
            for action in actions[number % len(actions)]:
                with suppress(ValidationFailedError, ExecutionError):
                    if client.step(action).done:
                        break
        yield


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
