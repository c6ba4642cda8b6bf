"""The code interpreter with the family's tasks: `examples.grpo_code.world:app`.

A reset's seed determines the task. The tools are the interpreter's, and `submit`, which submits the last code run.
"""

from collections.abc import Mapping
from dataclasses import replace
from secrets import randbits
from typing import Any

from envs.code_interpreter_env.grading import FunctionTask, JsonlTasks
from envs.code_interpreter_env.models import (
    AnyAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    Submit,
)
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.shared import shared_backend
from examples.grpo_code.family import make_task
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, UNSCORED
from openenv_core.tools import ToolObservation, ToolResult, tool
from openenv_core.worlds import WorldClient
from rl_bridge.rollout.assignment import TRAINING_SEEDS
from servers import create_app

SPLITS = ("train", "held_out")


class FamilyTasks(JsonlTasks):
    """The tasks of the family, generated on access."""

    def __init__(self) -> None:
        pass

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of training seeds and of held-out seeds."""
        return SPLITS

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks: one for each seed."""
        return TRAINING_SEEDS

    def task(self, split: str, index: int) -> FunctionTask:
        """Make the task of an index."""
        return make_task(index, held_out=split == "held_out")


class CodeFamilyEnvironment(CodeInterpreterEnvironment):
    """An interpreter in which a function is written, run any number of times, and submitted."""

    def __init__(self) -> None:
        super().__init__(tasks=FamilyTasks())
        self._newest = ""

    async def reset_async(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> CodeInterpreterObservation:
        """Start the task of a seed: a training task below `TRAINING_SEEDS`, a held-out one from there on."""
        chosen = randbits(31) if seed is None else seed
        task = {"split": SPLITS[chosen >= TRAINING_SEEDS], "index": chosen % TRAINING_SEEDS}
        observation = await super().reset_async(seed=chosen, episode_id=episode_id, task=task, **options)
        self._newest = ""
        assert isinstance(observation, CodeInterpreterObservation)  # as every reset with options
        return observation

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Count a step, and remember the code that is run, for `submit`."""
        super().before_call(name, arguments)
        if name == "run_python":
            self._newest = str(arguments.get("code", ""))

    @tool
    async def submit(self) -> ToolResult:
        """Hand in the code that ran last; it has to define the function. This can be done once, and ends the task."""
        verdict = (await self._submit(Submit(type="submit", code=self._newest))).verdict
        assert verdict is not None
        value = {"passed": verdict.reason == "passed", "cases_passed": verdict.passed, "cases": verdict.total}
        # A case's timeout is the submission's fault and earns 0: unscored, it would be better than a wrong answer.
        reward = 0.0 if verdict.timeout_scope == "case" else verdict.reward
        metadata: dict[str, Any] = {}
        if reward is None:  # not graded, which is not 0
            key = INFRASTRUCTURE_ERROR if verdict.reason == "sandbox_error" else UNSCORED
            metadata[key] = verdict.detail or verdict.reason
        return replace(ToolResult.of(value), reward=reward, done=self._state.done, metadata=metadata)


class CodeFamilyEnv(WorldClient):
    """The client: a reset returns the interpreter's observation, a step that of tools."""

    state_type = CodeInterpreterState
    reset_type = CodeInterpreterObservation
    default_app = f"{__name__}:app"


app = create_app(
    CodeFamilyEnvironment,
    AnyAction,
    CodeInterpreterObservation | ToolObservation,
    env_name="code_family",
    max_concurrent_envs=1024,
    state_cls=CodeInterpreterState,
    lifespan=shared_backend().lifespan,
)
