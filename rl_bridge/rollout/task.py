"""Tasks tie a training run to an environment. Subclasses for single environments live with the examples."""

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
"""The file with the evaluation's result, in the task's folder: the run's, or with several environments one in it."""


class Policy(Protocol):
    """The interface of the policy in training for tasks."""

    async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
        """Return the most likely answer to each chat, as text, under the newest weights."""
        ...

    async def answer_probabilities(
        self, chats: Sequence[Sequence[ChatMessage]], *, samples: int
    ) -> list[dict[str, float]]:
        """Return the probabilities, at temperature 1, of the answers to each chat that were met in so many samples."""
        ...


class Session(Protocol):
    """A session of an environment: an `EnvClient`, or a leased session."""

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode."""

    async def step(self, action: Any, /) -> StepResult[Any]:
        """Take a step."""


class Dialogue(Protocol):
    """The policy's side of one episode: prompts out, answers and observations in."""

    tool_calls: int
    """The number of tool calls sent to the environment."""

    def prompt(self) -> Sequence[int] | None:
        """Return the token ids to sample the next answer from; None if there is no room for an answer after them."""
        ...

    def read(self, completion: Completion, text: str) -> Sequence[Any] | Ending:
        """Parse an answer into actions, in order, or into the ending of the episode.

        Args:
            completion: The answer to the latest prompt.
            text: Its text, without special tokens.
        """
        ...

    def add_observation(self, observation: Any) -> None:
        """Take the observation that resulted from the next of those actions."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationResult:
    """The greedy policy's result in the held-out episodes.

    Attributes:
        rewards: The total reward of each episode, penalties included.
        endings: The ending of each episode, in the same order.
        dropped: The number of episodes lost to failures that were not the policy's.
        train_seconds: Wall time of the training loop, without set-up and evaluation.
        unscored: The number of episodes that were played and have no reward.
    """

    rewards: Sequence[float]
    endings: Sequence[Ending]
    dropped: int
    train_seconds: float
    unscored: int = 0


def load_task(reference: str, config: Config, folder: Path) -> "Task":
    """Make the task that `rollout.task` names; ConfigError if it cannot be imported or is no task."""
    return task_type(reference)(config, folder)


def load_tasks(config: Config, folder: Path) -> "dict[str, Task]":
    """Make the task of each of the run's environments, by name.

    A task sees only its own environment, see `Config.of`. With several environments, each task has its own folder
    within the run's.
    """
    tasks = {}
    if config.env is None and config.rollout.task is not None:
        # In a run on a dataset, the task makes the policy and reports.
        return {"": load_task(config.rollout.task, config, folder)}
    for name in config.environments:
        view, task_folder = config.of(name), folder / "environments" / name if name else folder
        if name:
            task_folder.mkdir(parents=True, exist_ok=True)
        tasks[name] = load_task(str(view.rollout.task), view, task_folder)
    return tasks


def task_type(reference: str) -> type["Task"]:
    """Return the task class that `rollout.task` names; ConfigError if it is no task."""
    task = resolve(reference, key="rollout.task")
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ConfigError(f"expected rollout.task to name a subclass of rl_bridge.rollout.Task, got {task!r}")
    return task


class Task(ABC):
    """Presents one environment to a language model: observations become chats, answers become actions.

    Args:
        config: The run's configuration.
        folder: The run's folder, for files of the task.
    """

    client_type: ClassVar[type[EnvClient[Any, Any, Any]]]
    """The typed client of the environment."""

    chat_grows: ClassVar[bool] = False
    """Whether each prompt of an episode contains the policy's earlier answers. If so, `rollout.max_length` bounds all
    answers together, otherwise each one; the greatest length of a trajectory follows from that."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder

    @abstractmethod
    def messages(self, observation: Any) -> list[ChatMessage]:
        """Return the chat that shows an observation to the policy."""

    @abstractmethod
    def parse(self, text: str) -> Any | None:
        """Return the action that an answer means; None if it means none. It must not guess.

        A ValueError (as pydantic's action models raise) or a LookupError ends the episode too, as `refused_action`: no
        text may end the run. Any other error is a bug in the task and ends the run.
        """

    async def begin(self, session: Session, policy: ChatPolicy, observation: Any) -> Dialogue:
        """Begin the dialogue of an episode.

        Args:
            session: The session on which it is played, after its reset.
            policy: The policy that plays.
            observation: The first observation.
        """
        return _SingleObservationDialogue(self, policy, observation)

    def target(self, observation: Any) -> Any:
        """Return the target for reward functions, such as the right answer, from an episode's first observation."""
        return None

    def make_policy(self) -> Path:
        """Make an initial policy, for runs without `model.path`.

        Returns:
            A folder with a checkpoint in the Hugging Face layout.

        Raises:
            NotImplementedError: The task makes none; `model.path` is required.
        """
        raise NotImplementedError

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the task's own metrics to log with each iteration, for example a win rate.

        Args:
            trajectories: All trajectories that the iteration trains on, with a `summary` in place of their turns.
        """
        return {}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Return cheap metrics of the greedy policy; called every `evaluation.interval` iterations and at the end."""
        return {}

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write and print the result, after the held-out episodes have been played.

        By default it writes the mean reward and the endings to `report.json` in the task's folder.
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


class _SingleObservationDialogue:
    """A dialogue in which each observation is a new chat, answered with one action."""

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

    def add_observation(self, observation: Any) -> None:
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
