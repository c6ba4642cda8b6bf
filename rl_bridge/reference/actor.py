"""The reference policy as a Monarch actor."""

import numpy as np
from monarch.actor import Actor, endpoint
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.reference.reference import Reference
from rl_bridge.trainer.settings import TrainerSettings


class ReferenceActor(Actor):
    """A thin shell around `Reference`."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings

    @endpoint
    async def start(self) -> None:
        """Load the model."""
        self._reference = Reference(self._settings)

    @endpoint
    async def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token, shape [T]."""
        return self._reference.logprobs(batch)
