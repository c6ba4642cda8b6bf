"""What ties a training run to one environment. Subclasses live with the examples, never in this package."""

import json
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from rich.console import Console

from openenv_core import EnvClient, StepResult
from rl_bridge.config import Config, resolve
from rl_bridge.errors import ConfigError, RolloutError
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, Ending, Trajectory

REPORT_FILE: Final = "report.json"
"""What came out, in the run's folder."""


class Policy(Protocol):
    """What a task may ask of the policy in training."""

    async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
        """Return the most likely answer to each chat, as text, under the newest weights."""
        ...


class Session(Protocol):
    """One environment: an `EnvClient`, or a leased session."""

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode."""

    async def step(self, action: Any, /) -> StepResult[Any]:
        """Take a step."""


class Dialogue(Protocol):
    """One episode as the policy reads and writes it."""

    tool_calls: int
    """Calls of tools that the environment has been asked for."""

    def prompt(self) -> Sequence[int] | None:
        """What the next answer is sampled after; None where an answer would not fit behind it."""
        ...

    def read(self, completion: Completion, text: str) -> Sequence[Any] | Ending:
        """The actions that an answer means, in order; or the ending that it is.

        Args:
            completion: The answer to the prompt before.
            text: Its own, without special tokens.
        """
        ...

    def hear(self, observation: Any) -> None:
        """What the environment answered to the next one of those actions."""
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
    """Make the task that `rollout.task` names; ConfigError where it cannot be imported, or is no task."""
    return task_type(reference)(config, folder)


def load_tasks(config: Config, folder: Path) -> "dict[str, Task]":
    """Make the task of each of the run's environments, by name.

    A task is told of its own environment alone, see `Config.of`. Of several each has a folder of its own in the run's.
    """
    tasks = {}
    if config.env is None and config.rollout.task is not None:
        # It makes the policy of a run on a dataset, and reports.
        return {"": load_task(config.rollout.task, config, folder)}
    for name in config.environments:
        view, own = config.of(name), folder / "environments" / name if name else folder
        if name:
            own.mkdir(parents=True, exist_ok=True)
        tasks[name] = load_task(str(view.rollout.task), view, own)
    return tasks


def task_type(reference: str) -> type["Task"]:
    """Find the task that `rollout.task` names."""
    task = resolve(reference, key="rollout.task")
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ConfigError(f"expected rollout.task to name a subclass of rl_bridge.rollout.Task, got {task!r}")
    return task


class Task(ABC):
    """One environment as a language model sees it.

    Args:
        config: The run's.
        folder: The run's, for whatever the task keeps.
    """

    client_type: ClassVar[type[EnvClient[Any, Any, Any]]]
    """The typed client of the environment."""

    chat_grows: ClassVar[bool] = False
    """Whether each prompt of an episode has in it what the policy has said before. Then `rollout.max_length` bounds all
    of its answers together, otherwise each alone; the greatest length goes by that."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder

    @abstractmethod
    def messages(self, observation: Any) -> list[ChatMessage]:
        """The chat that shows an observation to the policy."""

    @abstractmethod
    def parse(self, text: str) -> Any | None:
        """The action that an answer means; None where it means none. Never a guess.

        An answer on which this raises a ValueError, as models of actions do, or a LookupError ends the episode too, as
        `refused_action`: no text may end the run. Any other error is a fault of the task's, and does.
        """

    async def begin(self, session: Session, policy: ChatPolicy, observation: Any) -> Dialogue:
        """Begin to play an episode.

        Args:
            session: What it is played on, after its reset.
            policy: Who plays.
            observation: The first.
        """
        return _NewestState(self, policy, observation)

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

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return metrics of its own to log with each iteration, for example a rate of wins.

        Args:
            trajectories: All that the iteration trains on.
        """
        return {}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Look at the greedy policy, cheaply; called every `evaluation.interval` iterations and at the end."""
        return {}

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write and print what came out, after the held-out episodes have been played.

        By default `report.json` in the run's folder: what they earned in the mean, and how they ended.
        """
        report = {
            "episodes": len(result.rewards),
            "mean_reward": statistics.fmean(result.rewards) if result.rewards else None,
            "endings": dict(Counter(map(str, result.endings))),
            "dropped": result.dropped,
            "unscored": result.unscored,
            "train_seconds": result.train_seconds,
        }
        (self.folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if result.rewards:
            summary = f"{len(result.rewards):,} held-out episodes: mean reward {report['mean_reward']:.4g}"
            Console().print(summary, highlight=False, soft_wrap=True)


class _NewestState:
    """The policy is shown a chat for each observation, and answers with one action."""

    tool_calls = 0

    def __init__(self, task: Task, policy: ChatPolicy, observation: Any) -> None:
        self._task = task
        self._policy = policy
        self._observation = observation

    def prompt(self) -> Sequence[int] | None:
        return self._policy.prompt(self._task.messages(self._observation))

    def read(self, completion: Completion, text: str) -> Sequence[Any] | Ending:
        action = self._task.parse(text)
        return Ending.ILLEGAL if action is None else (action,)

    def hear(self, observation: Any) -> None:
        self._observation = observation


def to_floats(metrics: Mapping[str, Any], method: str) -> dict[str, float]:
    """Return what a task's method has measured as Python floats; NumPy scalars and tensors of one number are converted.

    Args:
        metrics: By name.
        method: Of the task, for the message.

    Raises:
        RolloutError: A value is not a number.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise RolloutError(
                f"expected numbers from the task's {method}(), got {name}={value!r}; return one number a name"
            ) from None
    return numbers
