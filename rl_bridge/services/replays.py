"""Fan-outs that define the replicas' state: the last of each is given to whoever starts."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_bridge.errors import StateUnavailableError
from rl_bridge.services.balancer import ReplicaTarget

RETRY_INTERVAL_S = 5.0
"""How long a state that cannot be had is waited for before it is asked for again."""


@dataclass(slots=True)
class Replay:
    """One fan-out, to be repeated for replicas that start.

    Attributes:
        number: Grows with every fan-out that is kept.
        values: What replicas that started answered to it, by their ids.
    """

    number: int
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    previous: "Replay | None"
    values: dict[int, Any] = field(default_factory=dict)


class Replays:
    """Keeps the last fan-out of each endpoint that defines state.

    Args:
        names: These endpoints.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._last: dict[str, Replay] = {}
        self._number = 0
        self._changed = asyncio.Event()

    def keep(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Replay | None:
        """Keep a fan-out that begins; None where the endpoint defines no state."""
        if name not in self._names:
            return None
        self._number += 1
        previous = self._last.get(name)
        if previous is not None:
            previous.previous = None  # one step back is enough
        replay = self._last[name] = Replay(self._number, name, args, kwargs, previous)
        self._tell()
        return replay

    def withdraw(self, replay: Replay) -> None:
        """Forget a fan-out that nobody took: the one before it holds again."""
        if self._last.get(replay.name) is replay:
            if replay.previous is None:
                del self._last[replay.name]
            else:
                self._last[replay.name] = replay.previous
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def catch_up(self, target: ReplicaTarget) -> None:
        """Call what was fanned out on a target that starts, in that order, until nothing is new.

        What cannot be had is waited for: where whoever provided it is gone, who provides it next says so by a fan-out;
        and every `RETRY_INTERVAL_S` it is asked for again, since it may only have been out of reach. The caller
        bounds the wait.

        Raises:
            TargetGoneError: A process of it is gone.
            Exception: What one of the calls raised.
        """
        taken: dict[str, Replay] = {}
        while new := sorted(
            (replay for replay in self._last.values() if taken.get(replay.name) is not replay),
            key=lambda replay: replay.number,
        ):
            replay, changed = new[0], self._changed
            try:
                replay.values[target.replica] = await target.call(replay.name, replay.args, replay.kwargs)
            except StateUnavailableError:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_INTERVAL_S):
                        await changed.wait()
            else:
                taken[replay.name] = replay
