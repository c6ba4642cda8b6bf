"""The dataset as a Monarch service."""

import asyncio
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint, endpoint

from rl_bridge.data.cursor import CursorFile
from rl_bridge.data.dataset import Dataset
from rl_bridge.data.examples import Example, open_source
from rl_bridge.data.settings import DatasetSettings
from rl_bridge.metrics.spans import PROCESS_SPANS
from rl_bridge.services.actor import ServiceActor


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
