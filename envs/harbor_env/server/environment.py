"""The environment: Harbor tasks, solved with commands and file actions, rewarded by the tasks' own tests."""

import asyncio
import logging
import os
import posixpath
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from inspect import isawaitable
from typing import Any, Final

from pydantic import StrictInt

from openenv_core import Environment, EnvironmentMetadata
from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.protocol.frames import metadata_of
from openenv_core.tasks import IndexedTasks, InvalidResetOptionError
from openenv_core.tools import (
    CallToolAction,
    DeclaredTools,
    ListToolsAction,
    ToolAction,
    ToolErrorType,
    ToolObservation,
    ToolResult,
    tool,
)

from ..models import (
    EditFile,
    HarborAction,
    HarborObservation,
    HarborState,
    Path,
    ReadFile,
    Run,
    Seconds,
    Submit,
    Text,
    WriteFile,
)
from ..tasks import HarborTask, HarborTasks
from .machines import (
    OUTPUT_BYTES,
    CommandResult,
    Machine,
    Machines,
    TransferError,
    pack_folder,
)
from .verifier import HarborVerdict, verify

logger = logging.getLogger(__name__)

TASKS: Final = "HARBOR_TASKS"
COMMAND_TIMEOUT_S: Final = 120.0
"""The default timeout of a command."""

_CHUNK_CHARS: Final = 30_000
"""How much text is passed to a shell in one environment variable, which the kernel limits to 128 KiB."""

_FAILURES: Final = (OpenEnvError, OSError)


class HarborEnvironment(
    DeclaredTools,
    IndexedTasks,
    Environment[HarborAction | ToolAction, HarborObservation | ToolObservation, HarborState],
):
    """Harbor tasks, one per episode, each in its own machine.

    The episode ends with `submit`, or after the task's `[agent] timeout_sec`; the tests run in either case. If they
    write no readable reward, the reward is None rather than 0. A failure of the infrastructure ends the episode and is
    reported as such; see `openenv_core.outcomes`.

    Args:
        tasks: The tasks; by default those that HARBOR_TASKS names.
        machines: Opens the machines that commands run in; by default shared by the sessions of this process.
    """

    BLOCKING = False

    def __init__(self, tasks: HarborTasks | None = None, machines: Machines | None = None) -> None:
        self._tasks = tasks or shared_tasks()
        self._machines = machines or shared_machines()
        self._machine: Machine | None = None
        self._task: HarborTask | None = None
        self._deadline: float | None = None

    async def reset_async(
        self, *, split: str | None = None, index: StrictInt | None = None, task: str | None = None
    ) -> HarborObservation:
        """Start an episode. The previous one ends without verification.

        Args:
            split: The split; by default the first one.
            index: The index of the task in the split; by default the seed chooses.
            task: The id of the task, instead of split and index.

        Raises:
            InvalidResetOptionError: There is no such task. The previous episode continues.
        """
        state = self.state
        try:
            if task is not None:
                if split is not None or index is not None:
                    raise KeyError("expected a task, or split and index, got both; leave one of them out")
                split, index = self._tasks.find(task)
            split = self._tasks.splits[0] if split is None else split
            if index is None:
                index = (state.seed or 0) % self._tasks.num_tasks(split)
            new_task = self._tasks.task(split, index)
        except (KeyError, IndexError) as error:
            raise InvalidResetOptionError(str(error.args[0])) from None
        await self.close_async()
        self._task = new_task
        state.task, state.split, state.index, state.kind = new_task.id, split, index, new_task.kind
        try:
            self._machine = await self._machines.open(new_task, verifier=False)
            workdir = self._machine.workdir
            new_task.collect_paths(workdir)  # fails now if the result could not be verified later
            if (files := new_task.loose_files) is not None:
                await self._machine.unpack(workdir, pack_folder(files, workdir), replace=False)
        except (*_FAILURES, TransferError) as error:
            return await self._end_after_failure(error)
        limit_s = new_task.config.agent.timeout_sec
        self._deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        return HarborObservation(task=new_task.instruction)

    async def step_async(
        self, action: HarborAction | ToolAction, **_: Any
    ) -> HarborObservation | ToolObservation:
        """Apply an action, given directly or as a tool call.

        Raises:
            EpisodeOverError: No episode is in progress.
        """
        if isinstance(action, ListToolsAction | CallToolAction):
            observation = self.tool_step(action)
            return await observation if isawaitable(observation) else observation
        return await self._act(action)

    @tool(annotations={"readOnlyHint": False})
    async def run(self, command: str, timeout_s: Seconds | None = None) -> ToolResult:
        """Run a command in a shell, in the working folder, and show what it prints.

        Args:
            command: As one types it.
            timeout_s: Seconds, after which all that runs is ended; 120 where it is left out.
        """
        return _to_tool_result(await self._act(Run(command=command, timeout_s=timeout_s)))

    @tool(annotations={"readOnlyHint": True})
    async def read_file(self, path: Path) -> ToolResult:
        """Read a file of text, 64 KiB of it at most."""
        return _to_tool_result(await self._act(ReadFile(path=path)))

    @tool(annotations={"readOnlyHint": False, "idempotentHint": True})
    async def write_file(self, path: Path, content: Text) -> ToolResult:
        """Write a file, and the folders above it; one that is there is replaced."""
        return _to_tool_result(await self._act(WriteFile(path=path, content=content)))

    @tool(annotations={"readOnlyHint": False})
    async def edit_file(self, path: Path, old: Text, new: Text) -> ToolResult:
        """Replace a text that stands in a file exactly once."""
        return _to_tool_result(await self._act(EditFile(path=path, old=old, new=new)))

    @tool(annotations={"readOnlyHint": False})
    async def submit(self) -> ToolResult:
        """Say that the task is done. Nothing can be done afterwards: tests judge what is there."""
        return _to_tool_result(await self._act(Submit()))

    # The methods of `openenv_core.tasks.TaskProvider`.

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits."""
        return self._tasks.splits

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks in a split."""
        return self._tasks.num_tasks(split)

    def get_task(self, split: str, index: int) -> Any:
        """Return the public description of a task."""
        return self._tasks.get_task(split, index)

    async def close_async(self) -> None:
        """Close the machine, if any. Idempotent."""
        machine, self._machine = self._machine, None
        if machine is not None:
            try:
                await asyncio.shield(machine.close())
            except _FAILURES as error:
                logger.warning("a machine of a task was not closed: %s", error)

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name and description."""
        return EnvironmentMetadata(
            name="harbor", description="Tasks in Harbor's format, judged by their tests."
        )

    async def _act(self, action: HarborAction) -> HarborObservation:
        machine = self._machine
        assert machine is not None
        left_s = self._time_left_s()
        try:
            if isinstance(action, Submit) or left_s <= 0:
                return await self._judge(truncated=not isinstance(action, Submit))
            result = await _run_action(machine, action, left_s)
            if result.status == "killed":
                # The policy has brought down its machine, and its work is lost with it.
                verdict = HarborVerdict(reward=0.0, reason=result.reason)
                await self.close_async()
                return self._end_episode(verdict, truncated=False, result=result)
            if self._time_left_s() <= 0:
                return await self._judge(truncated=True, result=result)
            return _to_observation(result)
        except _FAILURES as error:
            return await self._end_after_failure(error)

    def _time_left_s(self) -> float:
        return float("inf") if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    async def _judge(self, *, truncated: bool, result: CommandResult | None = None) -> HarborObservation:
        machine, self._machine = self._machine, None
        assert machine is not None
        assert self._task is not None
        # The server cancels this if the step times out; `verify` closes the open machines on the way out.
        verdict = await verify(self._machines, self._task, machine)
        return self._end_episode(verdict, truncated=truncated, result=result)

    def _end_episode(
        self, verdict: HarborVerdict, *, truncated: bool, result: CommandResult | None = None
    ) -> HarborObservation:
        self.state.done = True
        return _to_observation(
            result or CommandResult(reason=verdict.reason),
            done=True,
            truncated=truncated,
            reward=verdict.reward,
            unscored=verdict.reason if verdict.reward is None else None,
            rewards=verdict.rewards or None,
            verifier_output=verdict.output,
        )

    async def _end_after_failure(self, error: Exception) -> HarborObservation:
        """End the episode after an infrastructure failure."""
        logger.warning("the infrastructure of a task failed: %s", error)
        await self.close_async()
        self.state.done = True
        reason = str(error) or type(error).__name__
        return HarborObservation(
            status="sandbox_error", reason=reason, done=True, infrastructure_error=reason
        )


async def _run_action(machine: Machine, action: HarborAction, left_s: float) -> CommandResult:
    """Perform an action. Files are accessed through the policy's shell, and so with its user's permissions."""

    async def run_shell(command: str, **variables: str) -> CommandResult:
        result = await machine.run(command, min(COMMAND_TIMEOUT_S, left_s), variables)
        if not result.exit_code:
            return result
        return CommandResult(status="refused", reason=result.output.strip()[:500])

    async def write_text(path: str, text: str) -> CommandResult:
        result = await run_shell('mkdir -p -- "$(dirname -- "$FILE")" && : > "$FILE"', FILE=path)
        for start in range(0, len(text), _CHUNK_CHARS):
            if result.status == "ok":
                result = await run_shell(
                    'printf %s "$TEXT" >> "$FILE"', FILE=path, TEXT=text[start : start + _CHUNK_CHARS]
                )
        return result

    if isinstance(action, Run):
        return await machine.run(action.command, min(action.timeout_s or COMMAND_TIMEOUT_S, left_s), {})
    assert isinstance(action, ReadFile | WriteFile | EditFile)
    path = posixpath.join(machine.workdir, action.path)
    if isinstance(action, WriteFile):
        return await write_text(path, action.content)
    content = await run_shell('cat < "$FILE"', FILE=path)
    if isinstance(action, ReadFile) or content.status != "ok":
        return content
    count = content.output.count(action.old)
    if content.cut or "\ufffd" in content.output or count != 1:
        reason = f"expected the old text once in it, got it {count} times"
        if content.cut or "\ufffd" in content.output:
            reason = f"expected text in UTF-8 of at most {OUTPUT_BYTES >> 10} KiB; edit it by a command"
        return CommandResult(status="refused", reason=f"{path}: {reason}")
    return await write_text(path, content.output.replace(action.old, action.new))


def _to_observation(result: CommandResult, **end: Any) -> HarborObservation:
    return HarborObservation(**asdict(result), **end)


def _to_tool_result(observation: HarborObservation) -> ToolResult:
    if observation.status in ("refused", "sandbox_error"):
        kind = (
            ToolErrorType.EXECUTION_ERROR
            if observation.status == "refused"
            else ToolErrorType.TRANSPORT_ERROR
        )
        tool_result = ToolResult.failed(kind, observation.reason or observation.status)
    else:
        notes = [observation.reason] if observation.reason else []
        if observation.cut:
            notes.append("there was more output")
        if observation.exit_code:
            notes.append(f"exit code {observation.exit_code}")
        tool_result = ToolResult.of(
            "\n".join([observation.output, *(f"[{note}]" for note in notes)]).strip("\n")
        )
    return replace(
        tool_result,
        reward=observation.reward,
        done=observation.done,
        truncated=observation.truncated,
        metadata=metadata_of(observation),
    )


@lru_cache(maxsize=1)
def shared_machines() -> Machines:
    """Return the machines that the sessions of this process share."""
    return Machines()


@lru_cache(maxsize=1)
def shared_tasks() -> HarborTasks:
    """Return the tasks that HARBOR_TASKS names.

    Raises:
        ConfigurationError: The variable is not set, or names no valid tasks.
    """
    if not (path := os.environ.get(TASKS, "").strip()):
        raise ConfigurationError(
            f"expected a folder of Harbor tasks in {TASKS}, got nothing; `ropewalk serve harbor PATH` sets it"
        )
    return HarborTasks(path)
