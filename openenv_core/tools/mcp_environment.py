"""Environments of the released package that wrap an MCP server object."""

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property, partial
from typing import Any, Final, NoReturn, cast

from pydantic import TypeAdapter

from openenv_core.environment import Environment
from openenv_core.errors import ConfigurationError
from openenv_core.loop_thread import run_async_safely, shared_loop
from openenv_core.protocol.errors import text_of
from openenv_core.tools import (
    RESERVED_TOOL_NAMES,
    SILENT,
    ArgumentCompletion,
    CallToolAction,
    CallToolObservation,
    InvalidArgumentsError,
    ListToolsAction,
    ListToolsObservation,
    NoSuchPromptError,
    NoSuchResourceError,
    PromptResult,
    PromptSpec,
    ResourceContents,
    ResourceSpec,
    ResourceTemplateSpec,
    ToolContext,
    ToolErrorType,
    ToolFailedError,
    ToolResult,
    ToolSpec,
    ToolUnavailableError,
)
from openenv_core.tools.environment import to_failure
from openenv_core.tools.mcp_object import (
    McpObjectSession,
    ask_tool,
    error_text,
    error_type,
    mcp_json,
    plain_result,
    run_in_thread,
    specs,
    tool_result,
)
from openenv_core.types import Action, Observation

MODES: Final = ("production", "simulation")

MCP_TOOL_CALL_TIMEOUT: Final = 30.0
"""Default timeout of a call, in seconds."""


def get_server_tools(mcp_server: Any) -> dict[str, Any]:
    """Return the tools of a server object by name, as objects of its own package."""
    for method in ("get_tools", "list_tools"):
        if (listing := getattr(mcp_server, method, None)) is not None:
            tools = run_async_safely(listing())
            return dict(tools) if isinstance(tools, Mapping) else {tool.name: tool for tool in tools}
    return {}


class MCPEnvironment(Environment[Any, Any, Any]):
    """Lists and calls the tools of a server object; `_step_impl` handles other actions.

    Each call, over MCP too, is a step of the episode: a subclass that overrides `step` or `step_async`, to count or to
    reward, handles all of them.

    Each environment has its own session with its server object, in a thread that starts with the first call and ends
    with `close`. A `close` of a subclass must call this one.

    Args:
        mcp_server: A FastMCP, or the SDK's MCPServer.
        transform: See `Environment`.

    Raises:
        ConfigurationError: A tool has a reserved name, or the object is not a supported server.

    Attributes:
        mcp_server: The server object; None once the environment is closed.
        mcp_client: A client of it, not connected, for authors' own requests.
    """

    _mode: str | None = None
    _context: ToolContext = SILENT
    _last_step: Future[Observation] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Replace `step_async` by `step` if the most derived override is that of `step`."""
        super().__init_subclass__(**options)
        distances = {name: _distance_to(cls, name) for name in ("step", "step_async")}
        if distances["step"] < distances["step_async"]:
            # Servers prefer `step_async`, and run it in a thread if it is a plain function.
            cls.step_async = cls.step  # type: ignore[assignment]

    def __init__(self, mcp_server: Any, transform: Any = None) -> None:
        super().__init__(transform=transform)
        self._session = McpObjectSession(mcp_server)
        _check_names(get_server_tools(mcp_server))
        self.mcp_server: Any = mcp_server
        self.mcp_client: Any = self._session.new_client()

    @asynccontextmanager
    async def mcp_session(self) -> AsyncIterator[Any]:
        """Connect the environment's client in the current event loop, and yield it."""
        if self.mcp_client is None:
            raise RuntimeError("expected an open environment, got mcp_session() after close()")
        async with self.mcp_client as client:
            yield client

    @property
    def supports_code_mode(self) -> bool:
        """Whether `execute_code` is supported: always False."""
        return False

    def execute_code(self, code: str) -> NoReturn:
        """Raise: the released package runs this code inside the server, with all the server's permissions.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "expected tool calls, got execute_code(), which would run an agent's code inside of the server; give the "
            "agent the tools of envs/code_interpreter_env, or run code with openenv_core.sandbox"
        )

    def get_callables(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of the tools, if the server object exposes them."""
        known = {name: getattr(tool, "fn", None) for name, tool in get_server_tools(self.mcp_server).items()}
        callables = {name: function for name, function in known.items() if callable(function)}
        return {**callables, **self._own_tools}

    def tool(self, mode: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that makes a function a tool, in one mode or in all.

        Raises:
            ConfigurationError: There is no such mode, or the function has a reserved name.
        """
        if mode is not None and mode not in MODES:
            raise ConfigurationError(f"expected mode to be one of {', '.join(MODES)}, or None, got {mode!r}")

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            _check_names([function.__name__])
            if mode is not None:
                _spec_of(function)  # raises now if a type has no schema
                self._tools_by_mode.setdefault(mode, {})[function.__name__] = function
                return function
            declared: Callable[..., Any] = self.mcp_server.tool()(function)
            return declared

        return declare

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        """List the tools, call one, or pass other actions to `_step_impl`."""
        if isinstance(action, ListToolsAction | CallToolAction):
            return shared_loop().run(self._step_tools, action, timeout_s)
        return self._step_impl(action, timeout_s=timeout_s, **options)

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        """As `step`, without blocking the event loop."""
        if isinstance(action, ListToolsAction | CallToolAction):
            return await self._step_tools(action, timeout_s)
        step = partial(self._step_impl, action, timeout_s=timeout_s, **options)
        # A step whose caller stopped waiting still runs, in the one thread that an environment has for steps.
        while (last := self._last_step) is not None and not last.done():
            await asyncio.gather(asyncio.wrap_future(last), return_exceptions=True)
        self._last_step = run_in_thread(step)
        return await asyncio.wrap_future(self._last_step)

    @abstractmethod
    def _step_impl(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        """Apply an action that is not about tools."""

    async def list_tools(self) -> Sequence[ToolSpec]:
        """Return the tools of the current mode."""
        return await self._session.run(self._list_own_tools)

    def call_tool(
        self, name: str, arguments: Mapping[str, Any], context: ToolContext
    ) -> ToolResult | Awaitable[ToolResult]:
        """Call a tool, as a step of the episode. Raises `EpisodeOverError` if the author's step does."""
        action = CallToolAction(tool_name=name, arguments=dict(arguments))
        if inspect.iscoroutinefunction(type(self).step_async):
            return self._call_by_step(action, context)
        with self._forward_progress(context):
            observation: Any = self.step_async(action)
            return tool_result(observation)

    async def list_resources(self) -> Sequence[ResourceSpec]:
        """Return all resources."""
        return specs(
            ResourceSpec, await self._session.run(lambda client: client.list_resources()), "resources"
        )

    async def list_resource_templates(self) -> Sequence[ResourceTemplateSpec]:
        """Return all resource templates."""
        listed = await self._session.run(lambda client: client.list_resource_templates())
        return specs(ResourceTemplateSpec, listed, "resource_templates")

    async def read_resource(self, uri: str, context: ToolContext) -> ResourceContents:
        """Read a resource. Raises `NoSuchResourceError` if there is none at that URI, or it cannot be read."""
        try:
            result = await self._session.run(lambda client: client.read_resource(uri))
        except Exception as error:
            raise NoSuchResourceError(f"expected a resource at the address {uri[:200]!r}: {error}") from error
        return [mcp_json(content) for content in getattr(result, "contents", result)]

    async def list_prompts(self) -> Sequence[PromptSpec]:
        """Return all prompts."""
        return specs(PromptSpec, await self._session.run(lambda client: client.list_prompts()), "prompts")

    async def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> PromptResult:
        """Return the messages of a prompt.

        Raises:
            NoSuchPromptError: There is no prompt of that name.
            InvalidArgumentsError: The server object failed with these arguments.
        """
        try:
            result = await self._session.run(lambda client: client.get_prompt(name, dict(arguments)))
        except Exception as error:
            known_names = [prompt.name for prompt in await self.list_prompts()]
            if name not in known_names:
                known = ", ".join(known_names) or "none"
                raise NoSuchPromptError(f"expected one of the prompts {known}, got {name[:200]!r}") from error
            raise InvalidArgumentsError(f"expected arguments of the prompt {name!r}, got: {error}") from error
        return PromptResult(
            messages=[mcp_json(message) for message in result.messages], description=result.description
        )

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> ArgumentCompletion:
        """Return no completions: server objects rarely have any."""
        return ArgumentCompletion(values=[])

    def close(self) -> None:
        """End the session with the server object."""
        self._session.close()
        self.mcp_server = self.mcp_client = None

    @cached_property  # authors may declare tools before they call the constructor
    def _tools_by_mode(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """Tools of one mode, which the server object does not know, by mode and name."""
        return {}

    @property
    def _own_tools(self) -> dict[str, Callable[..., Any]]:
        return self._tools_by_mode.get(self._mode or "", {})

    @contextmanager
    def _forward_progress(self, context: ToolContext) -> Iterator[None]:
        """Route a tool's progress to a context, which the author's step does not take, and which may call no tool."""
        self._context = context
        try:
            yield
        finally:
            self._context = SILENT

    async def _call_by_step(self, action: CallToolAction, context: ToolContext) -> ToolResult:
        with self._forward_progress(context):
            return tool_result(await self.step_async(action))

    async def _step_tools(
        self, action: ListToolsAction | CallToolAction, timeout_s: float | None
    ) -> Observation:
        if isinstance(action, ListToolsAction):
            listed = await self._session.run(self._list_own_tools)
            return ListToolsObservation(tools=[spec.wire() for spec in listed])
        limit_s = MCP_TOOL_CALL_TIMEOUT if timeout_s is None else timeout_s
        try:
            return await self._session.run(self._call(action), limit_s)
        except TimeoutError:
            text = f"expected the tool {action.tool_name!r} to end within {limit_s:g} s, got none yet; it was given up"
            result = ToolResult.failed(ToolErrorType.TIMEOUT, text)
        except (ToolFailedError, ToolUnavailableError) as error:
            result = to_failure(error)
        return result.observation(action.tool_name)

    async def _list_own_tools(self, client: Any) -> list[ToolSpec]:
        listed = specs(ToolSpec, await client.list_tools(), "tools")
        mode_names = {name for tools in self._tools_by_mode.values() for name in tools}
        remaining = [spec for spec in listed if spec.name not in mode_names]
        return [*remaining, *map(_spec_of, self._own_tools.values())]

    def _call(self, action: CallToolAction) -> Callable[[Any], Awaitable[CallToolObservation]]:
        name, context = action.tool_name, self._context
        function = self._own_tools.get(name)

        async def call(client: Any) -> CallToolObservation:
            try:
                if function is not None:
                    value = function(**action.arguments)
                    result = plain_result(await value if inspect.isawaitable(value) else value)
                else:
                    result = await ask_tool(client, name, action.arguments, context)
            except Exception as error:
                reason = text_of(error)
            else:
                if not result.is_error:
                    return CallToolObservation(tool_name=name, result=result)
                reason = error_text(result)
            known_names = [spec.name for spec in await self._list_own_tools(client)]
            return ToolResult.failed(error_type(name, reason, known_names), reason).observation(name)

        return call


def _check_names(names: Iterable[str]) -> None:
    if reserved := sorted(RESERVED_TOOL_NAMES.intersection(names)):
        raise ConfigurationError(
            f"expected a tool of another name than the reserved {', '.join(sorted(RESERVED_TOOL_NAMES))}, got "
            f"{reserved}; a client has methods of these names"
        )


def _spec_of(function: Callable[..., Any]) -> ToolSpec:
    schema = TypeAdapter(cast(Any, function)).json_schema()
    return ToolSpec(
        name=function.__name__,
        description=inspect.getdoc(function) or "",
        input_schema={"properties": {}, **schema, "type": "object"},
    )


def _distance_to(cls: type, name: str) -> int:
    """Return the index in the MRO of the class that defines a method."""
    return next(age for age, owner in enumerate(cls.__mro__) if name in vars(owner))
