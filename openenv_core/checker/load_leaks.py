"""Whether a server holds more and more the longer it serves: memory, threads, open files.

Episodes are played in windows of equal size, and after each what the server holds is looked at, over all of its
processes, once they have thrown their garbage away: Python would do that now and then, so that memory would rise
for a thousand episodes and fall at the next. The first windows warm it up: caches and pools fill. What counts after
that is the slope over the windows (the median of the slopes between all pairs, which single jumps do not
move) and that it goes on: something that grows is looked at over as many episodes again, and has to grow there as
well. A cache that fills is level the second time; a leak is not.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final, TypeAlias

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.running import RunningServer, needs
from openenv_core.checker.semantic_hooking import collect, collecting, hooked
from openenv_core.checker.semantic_playing import answered, once, some_actions
from openenv_core.checker.subject import Client, Subject
from openenv_core.errors import ExecutionFailed, ValidationFailed
from openenv_core.targets import TargetKind

DEADLINE_S: Final = 900.0

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

BYTES_AN_EPISODE: Final = 512.0
"""A slope of the memory below this is not told from what allocators do by themselves. A server of ours that holds
nothing has one of less than 100 in windows of a hundred episodes."""

BYTES_IN_ALL: Final = 32 * 1024
"""Growth below this is a few pages."""

FEWEST: Final = 3
"""Threads, or files, by which a server has to have grown."""

RISING: Final = 0.6
"""The share of windows that have to end higher than the one before, for memory to be on the rise."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds.

    Attributes:
        memory: Bytes of memory that are its own.
        threads: Threads.
        files: Open files and sockets.
        processes: Processes; each has threads and files too.
    """

    memory: int
    threads: int
    files: int
    processes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """How something went over the windows.

    Attributes:
        values: What there was at the end of each window; the warm-up's are not among them.
        episodes: Episodes a window.
    """

    values: tuple[int, ...]
    episodes: int

    @property
    def total(self) -> int:
        """By how much more there is at the end than there was at the beginning."""
        return self.values[-1] - self.values[0]

    @property
    def slope(self) -> float:
        """How much each episode adds: the median over all pairs of windows."""
        pairs = combinations(enumerate(self.values), 2)
        slopes = [(high - low) / (later - earlier) for (earlier, low), (later, high) in pairs]
        return statistics.median(slopes) / self.episodes

    @property
    def rising(self) -> float:
        """The share of windows that end higher than the one before."""
        steps = [high > low for low, high in zip(self.values, self.values[1:], strict=False)]
        return sum(steps) / len(steps)


def leaks_memory(growth: Growth) -> bool:
    """Whether memory grows steadily, and by more than allocators do."""
    return growth.slope > BYTES_AN_EPISODE and growth.total > BYTES_IN_ALL and growth.rising >= RISING


def leaks_things(growth: Growth) -> bool:
    """Whether threads or files grow: they do not by themselves, so a few are enough."""
    return growth.total >= FEWEST and growth.slope > 0


Windows: TypeAlias = tuple[int, list[Held]]
"""The episodes of a window, and what was held after each."""


@check(Level.LOAD, deadline_s=DEADLINE_S)
def check_threads_stay_level(subject: Subject) -> None:
    """The server has no more threads and processes after a thousand episodes than after the first."""
    for name in ("processes", "threads"):
        growth = _growth(subject, name)
        if leaks_things(growth):
            raise _failed(
                name,
                growth,
                change="end in close() the threads, pools and processes that __init__ or reset starts, and start none "
                "that nobody ends",
            )


@check(Level.LOAD, deadline_s=DEADLINE_S)
def check_files_stay_level(subject: Subject) -> None:
    """The server has no more files and sockets open after a thousand episodes than after the first."""
    if any(leaks_things(_growth(subject, name)) for name in ("processes", "threads")):
        raise NotApplicable("what its threads hold grows with them: see threads_stay_level")
    growth = _growth(subject, "files")
    if leaks_things(growth):
        raise _failed(
            "open files",
            growth,
            change="open files and sockets in `with`, or close them in reset and in close()",
        )


@check(Level.LOAD, deadline_s=DEADLINE_S)
def check_memory_stays_level(subject: Subject) -> None:
    """The server has no more memory after a thousand episodes than after the first."""
    if any(leaks_things(_growth(subject, name)) for name in ("processes", "threads", "files")):
        raise NotApplicable(
            "what is left open grows, and memory with it: see threads_stay_level, files_stay_level"
        )
    growth = _growth(subject, "memory")
    if leaks_memory(growth):
        raise CheckFailed(
            f"expected level memory over {_count(growth)} episodes, got {growth.total / 2**20:.1f} MiB more, "
            f"{growth.slope:.0f} bytes each",
            change="keep nothing of an episode once it is over: look for lists, dicts and caches on the class or in "
            "the module that only ever grow, and bound them (functools.lru_cache(maxsize=), deque(maxlen=))",
        )


def _failed(what: str, growth: Growth, change: str) -> CheckFailed:
    return CheckFailed(
        f"expected as many {what} after {_count(growth)} episodes as before them, got {growth.values[0]} before "
        f"and {growth.values[-1]} after",
        change=change,
    )


def _count(growth: Growth) -> int:
    return growth.episodes * (len(growth.values) - 1)


def _growth(subject: Subject, name: str) -> Growth:
    episodes, windows = once(subject, "windows", lambda: _measured(subject))
    return Growth(tuple(getattr(held, name) for held in windows), episodes)


def _measured(subject: Subject) -> Windows:
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
        name: Growth(tuple(getattr(held, name) for held in windows), episodes)
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
        first = _held(self._server)
        while time.monotonic() < deadline:
            time.sleep(SETTLE_S)
            second = _held(self._server)
            if (second.threads, second.files, second.processes) == (
                first.threads,
                first.files,
                first.processes,
            ):
                return second
            first = second
        return first


def _held(server: RunningServer) -> Held:
    try:
        import psutil
    except ImportError as error:
        raise needs("psutil", error) from error
    memory = threads = files = processes = 0
    for pid in server.pids():
        with suppress(psutil.Error):
            process: Any = psutil.Process(pid)
            memory += process.memory_info().rss
            threads += process.num_threads()
            files += process.num_fds()
            processes += 1
    return Held(memory, threads, files, processes)
