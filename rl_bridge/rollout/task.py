"""What ties a training run to one environment. Subclasses live with the examples, never in this package."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from openenv_core import EnvClient
from rl_bridge.config import Config, resolve
from rl_bridge.errors import ConfigError
from rl_bridge.tokens.chat import Message
from rl_bridge.types import Ending, Trajectory


class Policy(Protocol):
    """What a task may ask of the policy in training."""

    async def answer_greedily(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        """The most likely answer to each chat, as text, under the newest weights."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationResult:
    """What the greedy policy did with the held-out episodes.

    Attributes:
        rewards: One total an episode, penalties included.
        endings: One an episode, in the same order.
        dropped: Episodes lost to failures that were not the policy's.
        train_seconds: Wall time of the training loop, set-up and evaluation apart.
        unscored: Episodes that were played and have no reward.
    """

    rewards: Sequence[float]
    endings: Sequence[Ending]
    dropped: int
    train_seconds: float
    unscored: int = 0


def load_task(reference: str, config: Config, folder: Path) -> "Task":
    """Make the task that `rollout.task` names.

    Args:
        reference: `package.module:Class`.
        config: The run's.
        folder: The run's.

    Raises:
        ConfigError: It cannot be imported, or is no task.
    """
    task_type = resolve(reference, key="rollout.task")
    if not (isinstance(task_type, type) and issubclass(task_type, Task)):
        raise ConfigError(
            f"expected rollout.task to name a subclass of rl_bridge.rollout.Task, got {task_type!r}"
        )
    return task_type(config, folder)


class Task(ABC):
    """One environment as a language model sees it.

    Args:
        config: The run's.
        folder: The run's, for whatever the task keeps.
    """

    client_type: ClassVar[type[EnvClient[Any, Any, Any]]]
    """The typed client of the environment."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder

    @abstractmethod
    def messages(self, observation: Any) -> list[Message]:
        """The chat that shows an observation to the policy."""

    @abstractmethod
    def parse(self, text: str) -> Any | None:
        """The action that an answer means; None where it means none. Never a guess."""

    def target(self, observation: Any) -> Any:
        """What reward functions are told of the right answer, from an episode's first observation."""
        return None

    def make_policy(self) -> Path:
        """Make an initial policy, for runs without `model.path`.

        Returns:
            A folder in the Hugging Face layout.

        Raises:
            NotImplementedError: The task has none; `model.path` must be given.
        """
        raise NotImplementedError

    def figures(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Figures of its own to log with each iteration, for example a rate of wins."""
        return {}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Look at the greedy policy, cheaply; called every `evaluation.interval` iterations and at the end."""
        return {}

    @abstractmethod
    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write and print what came out, after the held-out episodes have been played."""
