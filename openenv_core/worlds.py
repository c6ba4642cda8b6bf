"""Tool environments with generated tasks to train on: their episodes and clients."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from pydantic import Field, StrictInt

from openenv_core.client.tools import MCPToolClient
from openenv_core.errors import EpisodeOverError
from openenv_core.tasks import GeneratedTasks, InvalidResetOptionError
from openenv_core.tools import (
    ToolEnvironment,
    ToolResult,
    prompt,
    resource,
)
from openenv_core.types import EnvironmentMetadata, Observation, State, StepResult

MAX_CALLS: Final = 200

Split: TypeAlias = Literal["train", "validation", "test"]
Difficulty: TypeAlias = Literal["easy", "medium", "hard"]


class Level(StrEnum):
    """Difficulty of a task; each world defines what it means."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"


class WorldState(State):
    """State of an episode, for its operator only: the solution follows from the task's index."""

    seed: int | None = Field(default=None, description="what chose the task, unless its index was given")
    split: Split | None = Field(default=None, description="the split of the task; null before a reset")
    index: int | None = Field(default=None, description="the index of the task in its split")
    difficulty: Difficulty | None = None
    calls_left: int = Field(default=0, ge=0)
    done: bool = Field(default=False, description="whether the episode has ended")


class WorldTask(Protocol):
    """One task, including what is hidden from the policy."""

    @property
    def level(self) -> Level:
        """The task's difficulty."""

    def text(self, calls: int) -> str:
        """Return the task's text: everything that a policy needs to start.

        Args:
            calls: Number of tool calls in the episode.
        """


TaskT = TypeVar("TaskT", bound=WorldTask)
WorldStateT = TypeVar("WorldStateT", bound=WorldState)


class ToolWorld(GeneratedTasks, ToolEnvironment[WorldStateT], Generic[TaskT, WorldStateT]):
    """A tool environment with generated tasks. A subclass declares the tools and the abstract methods.

    The same task and calls give the same episode. Every call earns 0, except the one that sets `_finished`.

    Attributes:
        NAME: The environment's name.
        ABOUT: The environment's description.
        CALLS: Default number of calls in an episode.
    """

    DETERMINISTIC = True
    NAME: ClassVar[str]
    ABOUT: ClassVar[str]
    CALLS: ClassVar[int]

    _task: TaskT | None = None
    _calls = 0
    _finished = False

    @abstractmethod
    def make_task(self, number: int, *, held_out: bool, level: Level | None = None) -> TaskT:
        """Make the task of a number; see the function `make_task` in the subclass's module."""

    @abstractmethod
    def begin_task(self, task: TaskT, calls: int) -> Observation:
        """Start an episode with a task, and return the observation of the reset."""

    @abstractmethod
    def earned(self) -> float:
        """Return the reward of the episode that has just finished."""

    def reset(
        self,
        *,
        split: Split = "train",
        index: StrictInt | None = None,
        difficulty: Difficulty | None = None,
        max_calls: Annotated[StrictInt, Field(ge=1, le=MAX_CALLS)] | None = None,
    ) -> Any:
        """Start an episode.

        Args:
            split: The split of the task.
            index: The task's index in the split; None lets the seed decide.
            difficulty: None for the task's own. Another difficulty makes another task of the same index.
            max_calls: Number of calls after which the episode ends; None for `CALLS`.

        Raises:
            InvalidResetOptionError: The split has no such index. The current episode continues.
        """
        calls, state = self.CALLS if max_calls is None else max_calls, self.state
        try:
            index = (state.seed or 0) % self.num_tasks(split) if index is None else index
            number = self.task_number(split, index)
        except (KeyError, IndexError) as error:
            raise InvalidResetOptionError(str(error.args[0])) from None
        level = None if difficulty is None else Level(difficulty)
        task = self.make_task(number, held_out=split != "train", level=level)
        self.close()
        self._task, self._calls, self._finished = task, calls, False
        state.split, state.index, state.difficulty, state.calls_left = split, index, task.level.value, calls
        return self.begin_task(task, calls)

    def close(self) -> None:
        """Release the task. Idempotent."""
        self._task = None

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name and description."""
        return EnvironmentMetadata(name=self.NAME, description=self.ABOUT)

    def describe_task(self, split: str, index: int) -> Mapping[str, Any]:
        """Return a task's text, without the solution."""
        task = self.make_task(self.task_number(split, index), held_out=split != "train")
        known = {"id": f"{self.NAME}-{split}-{index}", "task": task.text(self.CALLS)}
        return {**known, **self.describe_more(task), "difficulty": task.level.value}

    def describe_more(self, task: TaskT) -> Mapping[str, Any]:
        """Return further fields of `describe_task`."""
        return {}

    # Agents that call the tools over MCP do not see the observation of the reset; they read the task here.

    @resource("task://current", mime_type="text/plain")
    def task(self) -> str:
        """What is to be done with the tools."""
        return self._current().text(self._calls)

    @prompt(name="task")
    def begin(self) -> str:
        """What is to be done with the tools, to begin a conversation with."""
        return self.task()

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Set the call's reward, and whether the episode is over."""
        state = self.state
        state.calls_left = self._calls - state.step_count
        state.done = self._finished or state.calls_left == 0
        reward = self.earned() if self._finished else 0.0
        return replace(result, reward=reward, done=state.done, truncated=state.done and not self._finished)

    def _current(self) -> TaskT:
        if self._task is None:
            raise EpisodeOverError("expected reset() before the first call, got a call; call reset() first")
        return self._task


class WorldClient(MCPToolClient):
    """A client of a `ToolWorld` at a URL, or, with `from_process()`, in a process of its own.

    `reset` takes `seed`, `episode_id`, `split`, `index`, `difficulty` and `max_calls`. `call_tool` returns a tool's
    result; `step(CallToolAction(...))` also returns its reward.

    Attributes:
        reset_type: The model of a reset's observation, with a field `task`.
    """

    reset_type: ClassVar[type[Observation]]

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        """Parse a reset's observation as `reset_type`, and all others as results of tools."""
        observation = payload["observation"]
        if "task" not in observation:
            return super()._parse_result(payload)
        return StepResult(self.reset_type.model_validate(observation), None, False, payload.get("metadata"))
