"""The dataset as a Monarch service."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint, endpoint

from rl_bridge.data.cursor import CursorFile
from rl_bridge.data.dataset import Dataset
from rl_bridge.data.examples import Example, open_source
from rl_bridge.metrics.spans import PROCESS_SPANS
from rl_bridge.services.actor import ServiceActor


@dataclass(kw_only=True, slots=True, frozen=True)
class DatasetSettings:
    """What a dataset consists of.

    Attributes:
        source: A file of JSON lines, or the dotted path of an iterable or of what returns one.
        seed: Decides the order.
        cursor: A file of the run's. What a replica has handed out, its successor does not hand out again.
        shuffle: Whether every epoch has an order of its own.
    """

    source: str
    seed: int
    cursor: str
    shuffle: bool = True


class DatasetActor(ServiceActor):
    """A thin shell around `Dataset`, for a service of one replica.

    An example is counted before it is handed out: one that was on its way when the process died is skipped in this
    epoch, never seen twice.
    """

    REPEATABLE = frozenset({"sample", "at", "state"})

    def __init__(self, settings: DatasetSettings) -> None:
        self._settings = settings

    @concurrent_endpoint
    async def setup(self) -> None:
        """Read the examples through, and find out what has been handed out."""
        settings = self._settings
        source = await asyncio.to_thread(open_source, settings.source)
        self._dataset = Dataset(source, seed=settings.seed, shuffle=settings.shuffle)
        self._cursor = CursorFile(Path(settings.cursor))
        self._dataset.taken = self._cursor.read()
        PROCESS_SPANS.rest("requests")

    @endpoint
    async def sample(self) -> Example:
        """The next example."""
        self._cursor.write(self._dataset.taken + 1)
        return self._dataset.sample()

    @endpoint
    async def at(self, number: int) -> Example:
        """See `Dataset.at`."""
        return self._dataset.at(number)

    @endpoint
    async def state(self) -> dict[str, Any]:
        """See `Dataset.state`."""
        return self._dataset.state()

    @endpoint
    async def restore(self, state: dict[str, Any]) -> None:
        """See `Dataset.restore`."""
        self._dataset.restore(state)
        self._cursor.write(self._dataset.taken)

    @concurrent_endpoint
    async def close(self) -> None:
        """Give the file up."""
        self._cursor.close()
