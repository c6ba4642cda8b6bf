"""What a rollout worker is started with."""

from dataclasses import dataclass

from rl_bridge.config import Config
from rl_bridge.environments.session import SessionDeadlines


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerSettings:
    """What a rollout worker is started with.

    Attributes:
        config: The run's.
        folder: The run's.
        model_path: A checkpoint with the policy's tokenizer.
        sessions: Episodes in flight at most, in this worker.
        deadlines: Of every wait for an environment.
        checkpoint_on_preemption: On SIGTERM, hand back what is finished of every assignment before going.
    """

    config: Config
    folder: str
    model_path: str
    sessions: int
    deadlines: SessionDeadlines
    checkpoint_on_preemption: bool
