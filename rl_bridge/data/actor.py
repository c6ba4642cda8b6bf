"""The dataset as a Monarch service."""

import asyncio
from typing import Any

from monarch.actor import concurrent_endpoint, endpoint

from rl_bridge.config import DataConfig
from rl_bridge.data.examples import Dataset, Example, open_source
from rl_bridge.metrics.spans import PROCESS_SPANS
from rl_bridge.services.actor import ServiceActor


class DatasetActor(ServiceActor):
    """Serves a `Dataset`, as a service of one replica.

    It saves no state: a restarted one has the same example at each place, and `sample` begins again at the first.
    """

    REPEATABLE = frozenset({"sample", "get_example", "identity"})

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._config = config
        self._seed = seed

    @concurrent_endpoint
    async def setup(self) -> None:
        """Open the source, which reads and checks all examples."""
        data = self._config
        source = await asyncio.to_thread(open_source, data.source)
        self._dataset = Dataset(source, seed=self._seed, shuffle=data.sampling != "sequential")
        PROCESS_SPANS.rest("requests")

    @endpoint
    async def sample(self) -> Example:
        """See `Dataset.sample`."""
        return self._dataset.sample()

    @endpoint
    async def get_example(self, index: int) -> Example:
        """See `Dataset.get_example`."""
        return self._dataset.get_example(index)

    @endpoint
    async def identity(self) -> dict[str, Any]:
        """See `Dataset.identity`."""
        return self._dataset.identity()
