"""The trainer as a Monarch actor."""

from monarch.actor import Actor, endpoint

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.trainer.trainer import Trainer
from rl_bridge.types import PolicyVersion
from rl_bridge.weights import SharedMemoryPublisher, SnapshotHandle


class TrainerActor(Actor):
    """A thin shell around `Trainer`, and the publisher of its weights."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._publisher = SharedMemoryPublisher()

    @endpoint
    async def start(self, resume: bool) -> PolicyVersion:
        """Load the model, and the newest checkpoint where asked; returns the version."""
        self._trainer = Trainer(self._settings)
        return self._trainer.resume().version if resume else 0

    @endpoint
    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train one iteration; returns its figures."""
        return self._trainer.step(batch)

    @endpoint
    async def publish(self) -> SnapshotHandle:
        """Put a snapshot of the weights where generators can read it."""
        return self._publisher.publish(self._trainer.version, self._trainer.hf_state_dict())

    @endpoint
    async def save(self, last: bool) -> None:
        """Write a checkpoint if one is due."""
        interval = self._settings.trainer.checkpoint_interval
        if interval and (last or self._trainer.version % interval == 0):
            self._trainer.save()

    @endpoint
    async def export(self, folder: str) -> None:
        """Write the weights as safetensors into a folder."""
        self._trainer.export(folder)

    @endpoint
    async def close(self) -> None:
        """Finish what is being written and give the shared memory back."""
        self._trainer.close()
        self._publisher.close()
