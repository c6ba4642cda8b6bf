"""Checks that many sessions can play at once, and that the server does not leak resources."""

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import combinations
from threading import Barrier, BrokenBarrierError
from typing import Final

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.playing import draw_actions, expect_answer
from openenv_core.checker.semantic import (
    ISOLATION_ADVICE,
    SessionTrace,
    compare_sessions,
    find_interference,
    play_isolated,
    play_session,
    repeats,
)
from openenv_core.checker.subject import SLOT_WAIT_S, Client, Subject
from openenv_core.checker.watching import WatchedServer, watch_server
from openenv_core.errors import CapacityError, ExecutionError, ValidationFailedError

_BYTES_AN_EPISODE: Final = 512.0
"""Memory growth per episode below this cannot be told from allocator noise. One of our servers without a leak grows by
less than 100 in windows of a hundred episodes."""

_BYTES_IN_ALL: Final = 32 * 1024
"""Total growth below this is only a few pages."""

_MIN_GROWTH: Final = 3
"""Minimum growth in threads or files that counts as a leak."""

_RISING: Final = 0.6
"""Share of windows that have to end higher than the previous one for memory growth to be steady."""

_ALL_BEGUN_TIMEOUT_S: Final = 60.0
"""Seconds for all sessions to begin."""

_PLAY_BUDGET_S: Final = 240.0
"""Seconds of play; a slow environment is judged by the episodes played in that time."""

_DEADLINE_S: Final = 900.0
"""Deadline of each leak check; the first one plays the episodes for all of them."""

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


@check(CheckLevel.LOAD, deadline_s=600.0)
def check_sessions_at_once(subject: Subject) -> None:
    """Many concurrent sessions all play to the end, and none sees another's episode."""
    if find_interference(subject) is not None:
        raise NotApplicableError("two sessions already interfere; see sessions_are_separate")
    with ExitStack() as stack:
        url, _ = stack.enter_context(subject.server_or_url())
        session_count = min(subject.limits.sessions, subject.cap or subject.limits.sessions)
        clients = _open_sessions(subject, stack, url, session_count)
        concurrent = _play(subject, clients)
        for client in clients:
            client.close()
        isolated = [play_isolated(subject, number, url) for number in range(len(clients))]
    if (difference := compare_sessions(isolated, concurrent, repeats(subject))) is not None:
        raise CheckError(
            f"expected {len(clients)} concurrent sessions not to see each other's episodes, got: {difference}",
            change=ISOLATION_ADVICE,
        )


def _open_sessions(subject: Subject, stack: ExitStack, url: str, count: int) -> list[Client]:
    """Open a number of sessions; fewer, but at least two, if the server's unknown cap is lower."""
    clients: list[Client] = []
    for number in range(count):
        wait_s = 0.0 if number else SLOT_WAIT_S
        client = stack.enter_context(subject.client(url, queue_timeout_s=wait_s))
        with expect_answer(f"session {number + 1} of {count}"):
            try:
                client.reset(seed=number)
            except CapacityError as error:
                if subject.cap is not None or number < 2:
                    raise CheckError(
                        f"expected room for {count} sessions, got {number}: {error}",
                        change="set create_app's max_concurrent_envs to what the environment supports",
                    ) from error
                client.close()
                return clients
        clients.append(client)
    return clients


def _play(subject: Subject, clients: Sequence[Client]) -> list[SessionTrace]:
    """Play an episode in each session, all at the same time."""
    barrier = Barrier(len(clients), timeout=_ALL_BEGUN_TIMEOUT_S)

    def play(number: int) -> SessionTrace:
        trace: SessionTrace = []
        session = play_session(subject, clients[number], number, trace)
        try:
            next(session)
            barrier.wait()  # every episode has begun before any goes on
            for _ in session:
                pass
        except BaseException:
            barrier.abort()
            raise
        return trace

    with ThreadPoolExecutor(len(clients), thread_name_prefix="openenv-check-load") as pool:
        futures = [pool.submit(play, number) for number in range(len(clients))]
    failures = [error for future in futures if (error := future.exception()) is not None]
    first = next((error for error in failures if not isinstance(error, BrokenBarrierError)), None)
    if first is not None:
        with expect_answer(f"{len(clients)} episodes at once"):
            raise first
    return [future.result() for future in futures]


def _measure(subject: Subject) -> dict[str, Growth] | NotApplicableError:
    """Play the episodes and return the growth of each resource, or an error if they are too few for a verdict.

    If a resource seems to leak, as many episodes are played again, and only these count. A slow environment plays fewer
    episodes per window, so that all windows fit into the time.
    """
    if subject.limits.episodes < _LEAST:
        return NotApplicableError(
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
        return NotApplicableError(
            f"too few episodes for a verdict: {episodes} in each of {len(windows)} windows, within "
            f"{_PLAY_BUDGET_S:g} s"
        )
    return _growths(windows, episodes)


def _growths(windows: Sequence[dict[str, int]], episodes: int) -> dict[str, Growth]:
    names = ("processes", "threads", "files", "memory")
    return {name: Growth(tuple(window[name] for window in windows), episodes) for name in names}


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


@check(CheckLevel.LOAD, deadline_s=_DEADLINE_S)
def check_threads_stay_level(subject: Subject) -> None:
    """The server has no more threads and processes after a thousand episodes than after the first."""
    growths, leaking_names = _measure_growths(subject)
    for name in ("processes", "threads"):
        if name in leaking_names:
            raise _make_error(
                name,
                growths[name],
                change="in close(), end every thread, pool and process that __init__ or reset has started",
            )


@check(CheckLevel.LOAD, deadline_s=_DEADLINE_S)
def check_files_stay_level(subject: Subject) -> None:
    """The server has no more files and sockets open after a thousand episodes than after the first."""
    growths, leaking_names = _measure_growths(subject)
    if "processes" in leaking_names or "threads" in leaking_names:
        raise NotApplicableError("open files grow with the threads; see threads_stay_level")
    if "files" in leaking_names:
        raise _make_error(
            "open files",
            growths["files"],
            change="open files and sockets in `with`, or close them in reset and in close()",
        )


@check(CheckLevel.LOAD, deadline_s=_DEADLINE_S)
def check_memory_stays_level(subject: Subject) -> None:
    """The server uses no more memory after a thousand episodes than after the first."""
    growths, leaking_names = _measure_growths(subject)
    if leaking_names not in ([], ["memory"]):
        raise NotApplicableError(
            "memory grows with the threads or files left open; see threads_stay_level, files_stay_level"
        )
    if leaking_names:
        growth = growths["memory"]
        raise CheckError(
            f"expected level memory over {growth.count} episodes, got {growth.total / 2**20:.1f} MiB more, "
            f"{growth.slope:.0f} bytes each",
            change="keep nothing of an episode once it is over: look for lists, dicts and caches on the class or in "
            "the module that only ever grow, and bound them (functools.lru_cache(maxsize=), deque(maxlen=)). "
            "A bounded cache stops growing once it is full: raise --episodes to see whether it does",
        )


def _measure_growths(subject: Subject) -> tuple[dict[str, Growth], list[str]]:
    growths = subject.compute_cached("growths", lambda: _measure(subject))
    if isinstance(growths, NotApplicableError):
        raise growths
    return growths, _find_leaks(growths)


def _make_error(label: str, growth: Growth, change: str) -> CheckError:
    return CheckError(
        f"expected as many {label} after {growth.count} episodes as before them, got {growth.values[0]} before "
        f"and {growth.values[-1]} after",
        change=change,
    )
