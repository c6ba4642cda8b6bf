"""The reference policy as a Monarch actor."""

import numpy as np
from monarch.actor import concurrent_endpoint
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.reference.reference import ReferenceReplica
from rl_bridge.services.actor import ServiceActor
from rl_bridge.trainer.settings import TrainerSettings


class ReferenceActor(ServiceActor):
    """A thin shell around `ReferenceReplica`."""

    REPEATABLE = frozenset({"logprobs"})

    def __init__(self, settings: TrainerSettings) -> None:
        self._replica = ReferenceReplica(settings)

    @concurrent_endpoint
    async def setup(self) -> None:
        """See `ReferenceReplica.setup`."""
        await self._replica.setup()

    @concurrent_endpoint
    async def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """See `ReferenceReplica.logprobs`."""
        return await self._replica.logprobs(batch)

    @concurrent_endpoint
    async def close(self) -> None:
        """See `ReferenceReplica.close`."""
        await self._replica.close()
