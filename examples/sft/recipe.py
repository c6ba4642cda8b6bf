"""The recipe's configuration, and the recording of its traces."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rl_bridge.config import NAME_PATTERN, Config, resolve
from rl_bridge.config.sections import Count, Section
from rl_bridge.data.traces import Recorder, Solver, Trace
from rl_bridge.errors import ConfigError
from rl_bridge.loops.sft import SftConfig
from rl_bridge.rollout import ToolTask
from rl_bridge.rollout.task import load_task

VALIDATION_SEEDS = 1_000_000
"""First seed of validation traces: other tasks than those of training traces, from the same split."""
VOCABULARY_SEEDS = 2_000_000
"""First seed of traces that only the tokenizer is trained on."""


class PolicyConfig(Section):
    """The initial tiny policy."""

    width: Annotated[int, Field(ge=64, multiple_of=64)] = 128
    """Width of the hidden state."""
    layers: Count = 3
    vocabulary_tasks: Annotated[int, Field(ge=0)] = 0
    """Number of further tasks whose words the tokenizer learns; the policy is not trained on them."""


class RecipeConfig(Section):
    """The recipe's file."""

    name: str = Field(default="sft", pattern=NAME_PATTERN)
    output_dir: str = "runs"
    world: str
    """The configuration of the reinforcement learning that follows; it names the environment and the task."""
    solver: str
    """The solver that plays the traces, as `package.module:function`; an `rl_bridge.data.traces.Solver`."""
    traces: Annotated[int, Field(ge=1, le=VALIDATION_SEEDS)]
    """Number of training traces."""
    validation_traces: Annotated[int, Field(ge=1, le=VOCABULARY_SEEDS - VALIDATION_SEEDS)] = 50
    """Number of validation traces, which decide when to stop."""
    policy: PolicyConfig = PolicyConfig()
    sft: SftConfig = SftConfig()


def solver_of(recipe: RecipeConfig) -> Solver:
    """Return the function that `solver` names.

    Raises:
        ConfigError: It cannot be imported, or is not callable.
    """
    solver: Any = resolve(recipe.solver, key="solver")
    if not callable(solver):
        raise ConfigError(f"expected solver to name a function, got {solver!r}")
    checked: Solver = solver
    return checked


def task_of(world: Config, folder: Path) -> ToolTask:
    """Return the task of a world of tools.

    Raises:
        ConfigError: The configuration names no such task, or no app to play it in.
    """
    if world.rollout.task is None or world.env is None or world.environment.app is None:
        raise ConfigError("expected a world with rollout.task and env.app, got one without")
    task = load_task(world.rollout.task, world, folder)
    if not isinstance(task, ToolTask):
        raise ConfigError(f"expected a task of a world of tools, got {type(task).__name__}")
    return task


async def record(task: ToolTask, solver: Solver, seeds: Iterable[int]) -> list[Trace]:
    """Let the solver play the tasks of some seeds on a server started for them.

    Raises:
        ConfigError: The solver failed a task, so its traces should not be imitated.
    """
    env = task.config.environment
    traces = []
    async with await task.client_type.from_process(env.app) as client:
        recorder = Recorder(task, client)
        for seed in seeds:
            await solver(await recorder.begin(seed, **env.reset), recorder.call)
            traces.append(trace := recorder.trace())
            if trace.reward < 1.0:
                raise ConfigError(
                    f"expected the solver to earn 1 at the task of seed {seed}, got {trace.reward}"
                )
    return traces
