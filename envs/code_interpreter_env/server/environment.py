"""The code interpreter environment: one interpreter per session, and actions that run code in it."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import isawaitable
from typing import Annotated, Any, Final, TypeAlias
from uuid import uuid4

from pydantic import Field

from openenv_core import Environment, EnvironmentMetadata
from openenv_core.errors import ConfigurationError, EpisodeOverError
from openenv_core.sandbox import Execution, FileInfo, FileRefusedError, Interpreter
from openenv_core.sandbox.results import EXIT_SANDBOX
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.tools import (
    CallToolAction,
    DeclaredTools,
    ListToolsAction,
    ToolAction,
    ToolContext,
    ToolErrorType,
    ToolFailedError,
    ToolObservation,
    ToolResult,
    ToolUnavailableError,
    tool,
)

from ..grading import Grader, JsonlTasks, Task, TaskSession, Verdict, public_view
from ..models import (
    MAX_TIMEOUT_S,
    Base64,
    Code,
    CodeInterpreterAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    CodeObservation,
    Execute,
    GetFile,
    Path,
    PutFile,
    Restart,
    Submit,
)
from .observations import (
    content_of,
    make_code_error,
    make_failure,
    to_file_result,
    to_observation,
    to_released,
    to_run_result,
)
from .options import choose_task, read_options
from .shared import INFRASTRUCTURE_ERRORS, InterpreterKeeper, KeptBranch, SharedBackend, shared_backend

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]

logger = logging.getLogger(__name__)

MAX_FETCHED_BYTES: Final = 8 << 20
"""The largest file that a step returns: it is encoded on the event loop, which blocks other sessions."""


class CodeInterpreterEnvironment(
    DeclaredTools,
    Environment[CodeInterpreterAction | ToolAction, CodeObservation | ToolObservation, CodeInterpreterState],
):
    """Runs untrusted Python in an interpreter that keeps its state from step to step.

    A reset is optional: a step before the first reset starts an episode with the server's defaults, as released coding
    environments do. An episode ends only when a task was chosen and a submission solved it or used up its attempts.

    Failures of the code never raise; the observation's status reports them. A failure of the infrastructure has the
    status "sandbox_error", for which no policy should be blamed. If either loses the interpreter's state, the next step
    gets a fresh interpreter with the files given at reset.

    Args:
        shared: The backend shared by the sessions of this process; by default built from environment variables.
        tasks: The tasks to choose from; by default those of the settings.
    """

    BLOCKING = False
    FORKABLE = True
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, shared: SharedBackend | None = None, tasks: JsonlTasks | None = None) -> None:
        self._shared = shared or shared_backend()
        self._tasks = self._shared.tasks if tasks is None else tasks
        self._keeper = InterpreterKeeper(self._shared, read_options({}, self._shared.settings))
        self._task: TaskSession | None = None
        self._state = CodeInterpreterState(episode_id=str(uuid4()))

    async def reset_async(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> CodeObservation:
        """Start an episode with a fresh interpreter, closing the previous one.

        Args:
            seed: Chooses a task if the option `task` leaves a choice. It does not seed the code's random generators.
            episode_id: The caller's name for the episode; None generates a uuid4.
            **options: `packages`: the packages to preload, out of those that the server offers. `limits`: fields of
                `openenv_core.sandbox.Limits` by name, up to the server's ceilings. `files`: content by path, as text
                or `{"content_base64": ...}`. `snapshot`: true keeps the state from before an execution that had to
                be killed. `task`: the task to work on, if the server has tasks.

        Raises:
            InvalidResetOptionError: An option is unknown or has an invalid value. The previous episode continues,
                unless only the backend could detect the error.
        """
        choice = read_options(options, self._shared.settings)
        task: Task | None = None
        if choice.task is not None:
            task = await choose_task(self._tasks, choice.task, seed)
            files = {path: content.encode() for path, content in task.files.items()}
            choice = replace(choice, files={**files, **choice.files})
        await self._keeper.end()
        self._keeper.lost = False
        self._keeper.choice = choice
        self._task = None if task is None else TaskSession(task, Grader(self._keeper))
        self._state = CodeInterpreterState(
            episode_id=str(uuid4()) if episode_id is None else episode_id,
            seed=seed,
            task=None if task is None else task.id,
        )
        try:
            await self._ensure_interpreter()
            execution = self._add_session(Execution(status="ok", files=self._keeper.initial_files))
        except ConfigurationError as error:
            raise InvalidResetOptionError(str(error)) from error
        except FileRefusedError as error:
            raise InvalidResetOptionError(f"reset option files: {error}") from error
        except INFRASTRUCTURE_ERRORS as error:
            execution = await self._end_after_failure(error)
        if all(value is None for value in options.values()):
            return to_released(execution, None)
        return (
            to_observation(execution)
            if task is None
            else to_observation(execution, prompt=task.prompt, task=public_view(task))
        )

    async def step_async(
        self, action: CodeInterpreterAction | ToolAction, *, timeout_s: float | None = None
    ) -> CodeObservation | ToolObservation:
        """Apply an action, given directly or as a tool call.

        Args:
            action: The action or tool call.
            timeout_s: Limits an execution whose action has no timeout of its own; clients over plain HTTP send it.

        Raises:
            EpisodeOverError: A submission has ended the episode.
        """
        if isinstance(action, ListToolsAction | CallToolAction):
            observation = self.tool_step(action)
            return await observation if isawaitable(observation) else observation
        self._count_step()
        if isinstance(action, Execute) and "type" not in action.model_fields_set:
            return to_released(await self._execute(action, timeout_s), action.code)
        return await self._act(action, timeout_s)

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Count the tool call as a step."""
        self._count_step()

    def _count_step(self) -> None:
        if self._state.done:
            raise EpisodeOverError
        self._state.step_count += 1

    # The actions as tools, for callers that support only tools: MCP hosts and chat templates.

    @tool(title="Run Python", annotations={"readOnlyHint": False, "openWorldHint": False})
    async def run_python(
        self, code: Code, context: ToolContext, timeout_s: Seconds | None = None
    ) -> ToolResult:
        """Run Python in an interpreter that keeps its variables and files from call to call.

        The value of a last expression is shown, and so is what was printed; figures come as images.

        Args:
            code: Python source.
            context: Told every second how long it has run.
            timeout_s: Seconds, where less than the session's limit.
        """
        action = Execute(type="execute", code=code, timeout_s=timeout_s)
        return to_run_result(await self._act(action, context=context))

    @tool(title="Read a file", annotations={"readOnlyHint": True, "openWorldHint": False})
    async def read_file(self, path: Path) -> ToolResult:
        """Read a file of the workspace: text as it is, pictures as images, anything else as a document.

        Args:
            path: Relative to the workspace: data/input.csv
        """
        observation = await self._act(GetFile(path=path))
        _require_done(observation)
        assert observation.file is not None
        return to_file_result(path, observation.file.data)

    @tool(
        title="Write a file",
        annotations={"readOnlyHint": False, "idempotentHint": True, "openWorldHint": False},
    )
    async def write_file(
        self, path: Path, content: str | None = None, content_base64: Base64 | None = None
    ) -> ToolResult:
        """Write a file of the workspace, and the folders above it; one that is there is replaced.

        Args:
            path: Relative to the workspace: data/input.csv
            content: What the file gets, as text; this or content_base64.
            content_base64: What the file gets, as base64.
        """
        if (content is None) == (content_base64 is None):
            message = "expected either content or content_base64, got both or neither; give one of them"
            return ToolResult.failed(ToolErrorType.INVALID_ARGS, message)
        observation = await self._act(PutFile(path=path, content=content, content_base64=content_base64))
        _require_done(observation)
        return ToolResult.of(asdict(observation.files[0]))

    @tool(title="List the files", annotations={"readOnlyHint": True, "openWorldHint": False})
    async def list_files(self) -> list[FileInfo]:
        """List the files of the workspace."""
        try:
            return await (await self._ensure_interpreter()).list_files()
        except FileRefusedError as error:
            raise ToolFailedError(str(error)) from error
        except INFRASTRUCTURE_ERRORS as error:
            await self._end_after_failure(error)
            raise ToolUnavailableError(str(error)) from error

    # The methods of `openenv_core.tasks.TaskProvider`; they return only the public part of tasks.

    async def list_splits(self) -> Sequence[Any]:
        """Return the task splits."""
        return await asyncio.to_thread(self._require_tasks().list_splits)

    async def num_tasks(self, split: str) -> int:
        """Return the number of tasks in a split."""
        return await asyncio.to_thread(self._require_tasks().num_tasks, split)

    async def list_tasks(self, split: str) -> Sequence[Any]:
        """Return the public part of all tasks in a split."""
        return await asyncio.to_thread(self._require_tasks().list_tasks, split)

    async def get_task(self, split: str, index: int) -> Any:
        """Return the public part of one task."""
        return await asyncio.to_thread(self._require_tasks().get_task, split, index)

    async def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> Sequence[Any]:
        """Return the public part of the tasks `start` to `stop`, `stop` excluded."""
        return await asyncio.to_thread(self._require_tasks().get_task_range, split, start, stop)

    def _require_tasks(self) -> JsonlTasks:
        if self._tasks is None:
            raise NotImplementedError  # the task routes report this as unsupported
        return self._tasks

    async def _act(
        self,
        action: CodeInterpreterAction,
        timeout_s: float | None = None,
        context: ToolContext | None = None,
    ) -> CodeInterpreterObservation:
        if isinstance(action, Execute):
            return to_observation(await self._execute(action, timeout_s, context))
        if isinstance(action, Submit):
            return await self._submit(action)
        fields: dict[str, Any] = {}
        try:
            files: tuple[FileInfo, ...] = ()
            if isinstance(action, Restart):
                self._record_interpreter(await self._keeper.restart())
                self._state.execution_count = 0
                files = self._keeper.initial_files
            else:
                interpreter = await self._ensure_interpreter()
                if isinstance(action, PutFile):
                    files = (await interpreter.put_file(action.path, action.data),)
                elif isinstance(action, GetFile):
                    data = await interpreter.get_file(action.path)
                    if len(data) > MAX_FETCHED_BYTES:
                        reason = f"it has {len(data)} bytes, and a step returns at most {MAX_FETCHED_BYTES}"
                        raise FileRefusedError(action.path, reason)
                    fields["file"] = content_of(action.path, data)
            execution = self._add_session(Execution(status="ok", files=files))
        except FileRefusedError as error:
            execution = self._add_session(make_code_error("FileRefusedError", str(error)))
        except INFRASTRUCTURE_ERRORS as error:
            execution = await self._end_after_failure(error)
        return to_observation(execution, **fields)

    @property
    def state(self) -> CodeInterpreterState:
        """A copy of the episode's state, so that callers cannot change it."""
        return self._state.model_copy()

    async def snapshot(self) -> "_EpisodeSnapshot":
        """Fork the interpreter and its files, without running any code again.

        Raises:
            NotForkableError: The episode was reset without `snapshot=True`.
            SandboxFailureError: The session cannot have another process.
        """
        task = self._task
        task_progress = None if task is None else (task.task, task.attempts_left, task.verdict)
        return _EpisodeSnapshot(await self._keeper.branch(), task_progress, self.state)

    async def restore(self, state: "_EpisodeSnapshot") -> None:
        """Continue with a fork of the interpreter in a snapshot.

        Raises:
            SandboxFailureError: The snapshot's interpreter can no longer be forked.
        """
        await self._keeper.adopt(state.branch)
        if state.task is not None:
            task, attempts_left, verdict = state.task
            self._task = TaskSession(task, Grader(self._keeper))
            self._task.attempts_left, self._task.verdict = attempts_left, verdict
        self._state = state.state.model_copy()

    async def close_async(self) -> None:
        """Close the interpreter."""
        await self._keeper.close()

    async def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name and description, with its isolation level and backend."""
        backend = await self._keeper.start_backend()
        return EnvironmentMetadata(
            name="code_interpreter",
            description=(
                "Runs Python in an interpreter that keeps its state from step to step. "
                f"Isolation: {backend.isolation}. Backend: {self._shared.settings.backend}."
            ),
        )

    async def _execute(
        self, action: Execute, timeout_s: float | None, context: ToolContext | None = None
    ) -> Execution:
        timeout_s = timeout_s if action.timeout_s is None else action.timeout_s
        progress = None if context is None else context.progress
        try:
            execution = await self._keeper.run(
                await self._ensure_interpreter(),
                action.code,
                timeout_s=timeout_s,
                stdin=action.stdin,
                progress=progress,
            )
        except INFRASTRUCTURE_ERRORS as error:
            execution = await self._end_after_failure(error)
        self._state.last_exit_code = execution.exit_code
        self._state.execution_count = execution.execution_count
        return execution

    async def _submit(self, action: Submit) -> CodeInterpreterObservation:
        if self._task is None:
            message = "expected a task to submit a solution of, got an episode without one"
            return to_observation(self._add_session(make_code_error("NoTask", message)))
        verdict = await self._task.submit(action.code)
        done = self._state.done = self._task.done
        if verdict.reason == "sandbox_error":
            observation = self._add_session(make_failure(verdict.detail))
        else:
            observation = replace(self._add_session(Execution(status="ok")), isolation=verdict.isolation)
        return to_observation(observation, done=done, reward=verdict.reward, verdict=verdict)

    async def _ensure_interpreter(self) -> Interpreter:
        return self._record_interpreter(await self._keeper.ensure_ready())

    def _record_interpreter(self, interpreter: Interpreter) -> Interpreter:
        self._state.session_id = interpreter.session_id
        self._state.isolation = interpreter.isolation
        return interpreter

    def _add_session(self, execution: Execution) -> Execution:
        """Fill in the interpreter's fields of an execution that was not returned by an interpreter."""
        state = self._state
        return replace(
            execution,
            execution_count=state.execution_count,
            session_id=state.session_id,
            isolation=state.isolation,
        )

    async def _end_after_failure(self, error: Exception) -> Execution:
        """Close the interpreter after an infrastructure failure, and return the failure as an execution."""
        await self._keeper.end()
        logger.warning("the sandbox failed: %s", error)
        self._state.last_exit_code = EXIT_SANDBOX
        return self._add_session(make_failure(str(error), state_lost=True))


@dataclass(frozen=True, slots=True)
class _EpisodeSnapshot:
    """A snapshot of an episode: its interpreter, its task with the attempts left, and its state."""

    branch: KeptBranch
    task: tuple[Task, int, Verdict | None] | None
    state: CodeInterpreterState

    async def close(self) -> None:
        await self.branch.close()


def _require_done(observation: CodeInterpreterObservation) -> None:
    """Raise a tool error if an action on a file failed."""
    if observation.status == "sandbox_error":
        raise ToolUnavailableError(observation.reason or "the sandbox failed")
    if observation.error is not None:
        raise ToolFailedError(observation.error.evalue)
