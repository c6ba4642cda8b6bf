"""A conversation at the desk: the customer's requests, the records, and what is different at the end."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from openenv_core import EnvironmentMetadata
from openenv_core.errors import EpisodeOverError
from openenv_core.tasks import GeneratedTasks, read_task_options
from openenv_core.tools import ToolResult, prompt, resource

from ..models import ShopObservation, ShopState
from ..tasks import CALLS, TaskDifficulty, make_task
from ..world.desk import Desk
from ..world.rules import Fact, RightOutcome, facts, judge, verdicts
from .tools import DeskTools


class ShopEnvironment(GeneratedTasks, DeskTools):
    """The customer desk of a shop with policies that are written down. A customer asks for one to three things.

    The task decides the shop, the figures in its policies, and what the customer wants and answers, so the same task
    and calls give the same episode. At the end the records are compared with what they would be if everything had
    been right, which is worked out from the records and the policies before the first call, and is in nothing that
    a caller can see.
    """

    DETERMINISTIC = True
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._before: dict[Fact, Any] = {}
        self._verdicts: tuple[RightOutcome, ...] = ()
        self._calls = CALLS
        self._state = ShopState()

    def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        difficulty: str | None = None,
        max_calls: int | None = None,
        **unknown: Any,
    ) -> ShopObservation:
        """Open the desk, and let a customer come.

        Args:
            seed: Chooses the task of a split where `index` does not; None draws a seed, which `state` then tells.
            episode_id: The caller's name for the episode; None makes a uuid4.
            split: train (also where it is None), validation or test.
            index: The task of the split.
            difficulty: easy, medium or hard: one request, two, or three; None leaves it to the task. With another
                difficulty an index is another task.
            max_calls: After how many calls the episode ends; None for 40.
            **unknown: Refused.

        Raises:
            InvalidResetOptionError: An unknown option, or a value that cannot be. The episode before goes on.
        """
        options = read_task_options(
            type(self),
            TaskDifficulty,
            CALLS,
            seed=seed,
            episode_id=episode_id,
            split=split,
            index=index,
            difficulty=difficulty,
            max_calls=max_calls,
            unknown=unknown,
        )
        number = self.task_number(options.split, options.index)
        task = make_task(number, held_out=options.split != "train", level=options.level)
        scenario = task.scenario
        self._task, self._calls, self._finished = task, options.max_calls, False
        self._before, self._verdicts = facts(scenario.records), verdicts(scenario)
        self._desk = Desk(scenario.records, len(scenario.requests))
        self._state = ShopState(
            episode_id=str(uuid4()) if episode_id is None else episode_id,
            seed=options.seed,
            split=options.split,
            index=options.index,
            difficulty=task.level.value,
            calls_left=options.max_calls,
        )
        return ShopObservation(
            task=task.text(options.max_calls),
            requests=len(scenario.requests),
            difficulty=task.level.value,
            calls_left=options.max_calls,
        )

    @property
    def state(self) -> ShopState:
        """Where the episode stands: a copy, so that the holder of it cannot change the task."""
        return self._state.model_copy()

    def close(self) -> None:
        """Let go of everything."""
        self._task = self._desk = None
        self._before, self._verdicts = {}, ()

    def get_metadata(self) -> EnvironmentMetadata:
        """What the environment says of itself."""
        return EnvironmentMetadata(
            name="shop",
            description="The customer desk of a shop: requests to be handled by written policies.",
        )

    def describe_task(self, split: str, index: int) -> Mapping[str, Any]:
        """Return what the customer writes, without what would be right."""
        task = make_task(self.task_number(split, index), held_out=split != "train")
        return {"id": f"shop-{split}-{index}", "task": task.text(CALLS), "difficulty": task.level.value}

    # An agent that calls the tools over MCP sees no reset; it reads the task here.

    @resource("task://current", mime_type="text/plain")
    def task(self) -> str:
        """What is to be done with the tools."""
        return self._asked().text(self._calls)

    @prompt(name="task")
    def begin(self) -> str:
        """What is to be done with the tools, to begin a conversation with."""
        return self.task()

    # Around every call, one that fails too.

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Refuse calls outside of an episode."""
        self._at_desk()
        if self._state.done:
            raise EpisodeOverError

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Count the call, and at the end say what the conversation earned."""
        state = self._state
        state.step_count += 1
        state.calls_left = self._calls - state.step_count
        state.done = self._finished or state.calls_left == 0
        return replace(result, reward=self._earned() if self._finished else 0.0, done=state.done)

    def _earned(self) -> float:
        desk = self._at_desk()
        return judge(self._verdicts, desk.replies, self._before, facts(desk.records)).reward
