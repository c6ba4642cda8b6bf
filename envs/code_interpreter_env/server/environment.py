"""The code interpreter: one interpreter a session, and actions that run code in it."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from inspect import isawaitable
from typing import Any, Final
from uuid import uuid4

from openenv_core import Environment, EnvironmentMetadata
from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import Execution, FileInfo, FileRefusedError, Interpreter
from openenv_core.tools import (
    CallToolAction,
    ListToolsAction,
    ToolAction,
    ToolContext,
    ToolFailedError,
    ToolObservation,
    ToolUnavailableError,
)

from ..grading import Grader, JsonlTasks, TaskSession
from ..models import (
    CodeInterpreterAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    CodeObservation,
    Execute,
    GetFile,
    InvalidResetOptionError,
    PutFile,
    Restart,
    Submit,
)
from .house import SharedBackend, house
from .keeper import TROUBLE, InterpreterKeeper, lost, wait_or_interrupt
from .observations import content_of, failed, full, refused, released, without_task
from .options import Judging, ResetChoice, TaskMethods, chosen, chosen_task
from .tools import InterpreterTools

logger = logging.getLogger(__name__)

MAX_FETCHED_BYTES: Final = 8 << 20
"""The greatest file that one step returns: it is encoded on the event loop, where others wait."""


class CodeInterpreterEnvironment(
    TaskMethods,
    InterpreterTools,
    Environment[CodeInterpreterAction | ToolAction, CodeObservation | ToolObservation, CodeInterpreterState],
):
    """Runs Python that nobody has read, in an interpreter that keeps its state from step to step.

    Reset is not needed: a step before the first one begins an episode with what the server gives by default, as
    released coding environments do. An episode ends only where a task was chosen and a solution was submitted.

    What code does never raises here. The observation's status tells it, and tells it apart from a failure of the
    infrastructure, "sandbox_error", which no policy should be blamed for. After either of them that has cost the
    interpreter its state, the next step has a fresh one with the files that the reset brought.

    Args:
        shared: What the sessions of this process share; by default as the environment's variables say.
        tasks: Where tasks come from; by default those of the settings.
    """

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, shared: SharedBackend | None = None, tasks: JsonlTasks | None = None) -> None:
        self._house = shared or house()
        self._tasks = self._house.tasks if tasks is None else tasks
        self._keeper = InterpreterKeeper(self._house, chosen({}, self._house.settings))
        self._task: TaskSession | None = None
        self._state = CodeInterpreterState(episode_id=str(uuid4()))

    async def reset_async(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> CodeObservation:
        """Begins an episode with a fresh interpreter; the one before is ended.

        Args:
            seed: Chooses a task, where the option leaves a choice; code that wants chance seeds it itself.
            episode_id: The caller's name for the episode; None makes a uuid4.
            **options: `packages`: a list of those that the server preloads. `limits`: fields of
                `openenv_core.sandbox.Limits` by name, up to the server's ceilings. `files`: content by path, text or
                `{"content_base64": ...}`. `snapshot`: true keeps the state of before an execution that had to be
                killed. `task`: which task, where the server has some.

        Raises:
            InvalidResetOptionError: An unknown option, or a value that cannot be. The episode before goes on, unless it
                took the backend to find out.
        """
        choice = chosen(options, self._house.settings)
        task = await self._began(choice, seed)
        if task is not None:
            choice = replace(choice, files={**task.files, **choice.files})
        await self._keeper.end()
        self._keeper.lost = False
        self._keeper.choice, self._task = choice, task
        self._state = CodeInterpreterState(
            episode_id=str(uuid4()) if episode_id is None else episode_id,
            seed=seed,
            task=None if task is None else str(task.view["id"]),
        )
        try:
            await self._ready()
            began = self._told(Execution(status="ok", files=self._keeper.brought))
        except ConfigurationError as error:
            raise InvalidResetOptionError(str(error)) from error
        except FileRefusedError as error:
            raise InvalidResetOptionError(f"reset option files: {error}") from error
        except TROUBLE as error:
            await self._keeper.end()
            began = self._failed(error)
        if all(value is None for value in options.values()):
            return released(began, None)
        return full(began) if task is None else full(began, prompt=task.prompt, task=task.view)

    async def step_async(
        self, action: CodeInterpreterAction | ToolAction, *, timeout_s: float | None = None
    ) -> CodeObservation | ToolObservation:
        """Applies an action, or calls a tool that is one.

        Args:
            action: What to do.
            timeout_s: Bounds an execution that names no time-out of its own; callers over plain HTTP send it.

        Raises:
            EpisodeOverError: A solution was submitted.
        """
        if isinstance(action, ListToolsAction | CallToolAction):
            told = self.tool_step(action)
            return await told if isawaitable(told) else told
        self._count()
        if isinstance(action, Execute) and "type" not in action.model_fields_set:
            return released(await self._execute(action, timeout_s), action.code)
        return await self._act(action, timeout_s)

    async def _act(
        self,
        action: CodeInterpreterAction,
        timeout_s: float | None = None,
        context: ToolContext | None = None,
    ) -> CodeInterpreterObservation:
        if isinstance(action, Execute):
            return full(await self._execute(action, timeout_s, context))
        if isinstance(action, Submit):
            return await self._submit(action)
        fields: dict[str, Any] = {}
        try:
            files: tuple[FileInfo, ...] = ()
            if isinstance(action, Restart):
                self._known(await self._keeper.anew())
                self._state.execution_count = 0
                files = self._keeper.brought
            else:
                interpreter = await self._ready()
                if isinstance(action, PutFile):
                    files = (await interpreter.put_file(action.path, action.data),)
                elif isinstance(action, GetFile):
                    fields["file"] = content_of(action.path, await self._fetched(interpreter, action.path))
            execution = self._told(Execution(status="ok", files=files))
        except FileRefusedError as error:
            execution = self._told(refused(error))
        except TROUBLE as error:
            await self._keeper.end()
            execution = self._failed(error)
        return full(execution, **fields)

    @property
    def state(self) -> CodeInterpreterState:
        """Where the episode stands: a copy, so that the holder of it cannot change the episode."""
        return self._state.model_copy()

    async def close_async(self) -> None:
        """End the interpreter."""
        await self._keeper.close()

    async def get_metadata(self) -> EnvironmentMetadata:
        """What the environment says of itself, and what its code runs behind."""
        backend = await self._keeper.held()
        return EnvironmentMetadata(
            name="code_interpreter",
            description=(
                "Runs Python in an interpreter that keeps its state from step to step. "
                f"Isolation: {backend.isolation}. Backend: {self._house.settings.backend}."
            ),
        )

    async def _began(self, choice: ResetChoice, seed: int | None) -> TaskSession | None:
        if choice.task is None:
            return None
        task = await chosen_task(self._tasks, choice.task, seed)
        return TaskSession(task, Grader(Judging(self._keeper.held, choice.packages)))

    async def _execute(
        self, action: Execute, timeout_s: float | None, context: ToolContext | None = None
    ) -> Execution:
        timeout_s = timeout_s if action.timeout_s is None else action.timeout_s
        try:
            interpreter = await self._ready()
            running = interpreter.execute(action.code, timeout_s=timeout_s, stdin=action.stdin)
            execution = await (running if context is None else self._spared(running, interpreter, context))
        except TROUBLE as error:
            await self._keeper.end()
            execution = self._failed(error)
        self._keeper.lost = execution.state_lost
        state = self._state
        state.last_exit_code = execution.exit_code
        state.execution_count = execution.execution_count
        return execution

    async def _spared(
        self, running: Coroutine[Any, Any, Execution], interpreter: Interpreter, context: ToolContext
    ) -> Execution:
        task = asyncio.ensure_future(running)
        try:
            return await wait_or_interrupt(
                task, interpreter, self._keeper.choice.limits.grace_s, context.progress
            )
        except asyncio.CancelledError:
            self._keeper.lost = lost(task)
            raise

    async def _listed(self) -> list[FileInfo]:
        try:
            return await (await self._ready()).list_files()
        except FileRefusedError as error:
            raise ToolFailedError(str(error)) from error
        except TROUBLE as error:
            await self._keeper.end()
            self._failed(error)
            raise ToolUnavailableError(str(error)) from error

    async def _submit(self, action: Submit) -> CodeInterpreterObservation:
        if self._task is None:
            return full(self._told(without_task()))
        verdict = await self._task.submit(action.code)
        done = self._state.done = self._task.done
        if verdict.reason == "sandbox_error":
            seen = self._told(failed(verdict.detail))
        else:
            seen = replace(self._told(Execution(status="ok")), isolation=verdict.isolation)
        return full(seen, done=done, reward=verdict.reward, verdict=verdict)

    async def _ready(self) -> Interpreter:
        return self._known(await self._keeper.ready())

    def _known(self, interpreter: Interpreter) -> Interpreter:
        self._state.session_id = interpreter.session_id
        self._state.isolation = interpreter.isolation
        return interpreter

    async def _fetched(self, interpreter: Interpreter, path: str) -> bytes:
        data = await interpreter.get_file(path)
        if len(data) > MAX_FETCHED_BYTES:
            raise FileRefusedError(
                path, f"it has {len(data)} bytes, and a step returns at most {MAX_FETCHED_BYTES}"
            )
        return data

    def _told(self, execution: Execution) -> Execution:
        """Return an execution that came from no interpreter with what there is to know of the one that there is."""
        state = self._state
        return replace(
            execution,
            execution_count=state.execution_count,
            session_id=state.session_id,
            isolation=state.isolation,
        )

    def _failed(self, error: Exception) -> Execution:
        logger.warning("the sandbox failed: %s", error)
        self._state.last_exit_code = -1
        return self._told(failed(str(error), state_lost=True))
