"""Lists and calls the tools of an environment, which are methods of its own or actions of its `step`."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

from openenv_core.errors import PicklableError
from openenv_core.outcomes import outcome_of
from openenv_core.protocol.errors import short
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    DeclaredTools,
    ListToolsAction,
    ListToolsObservation,
    ToolContext,
    ToolErrorType,
    ToolResult,
    Toolset,
    ToolSpec,
    is_tool_host,
)
from servers.execution import Factory
from servers.sessions import EnvironmentSession, MethodRequest

Wait: TypeAlias = Callable[[Any], Awaitable[Any]] | None

_LISTED = {
    "list_tools": "tools",
    "list_resources": "resources",
    "list_resource_templates": "templates",
    "list_prompts": "prompts",
}
"""The methods that list, with the attribute of a `Toolset` that has what they list."""

METHODS: Mapping[str, str] = {
    "resources": "list_resources",
    "prompts": "list_prompts",
    "completions": "complete",
}
"""The method by which a tool host shows that it supports each further feature."""


class Tooling:
    """Lists and calls the tools of an app's environments.

    Attributes:
        toolset: The tools that the class declares, if its instances cannot list others.
    """

    def __init__(self, factory: Factory, action: Any) -> None:
        self._owner = factory if isinstance(factory, type) else None
        self._steps = _is_tool_action(action)
        self.toolset = _find_toolset(self._owner)

    @property
    def possible(self) -> bool:
        """Whether there may be tools; True if the environment is made by a function, so that only an instance tells."""
        return self._owner is None or self._steps or is_tool_host(self._owner)

    def offers(self, feature: str) -> bool:
        """Whether there may be resources, prompts or completions, as named by `feature`."""
        if (toolset := self.toolset) is not None:
            return bool(getattr(toolset, feature) or (feature == "resources" and toolset.templates))
        return self._owner is None or (
            is_tool_host(self._owner) and callable(getattr(self._owner, METHODS[feature], None))
        )

    def has_tools(self, session: EnvironmentSession) -> bool:
        """Whether this environment has tools to list and call."""
        return session.is_tool_host or self._steps

    def list_declared(self, method: str) -> Sequence[Any] | None:
        """Return what a listing method would return, or None if an instance has to be called."""
        if self.toolset is None:
            return None
        return [each.spec for each in getattr(self.toolset, _LISTED[method]).values()]

    def request_tools(self, session: EnvironmentSession) -> tuple[Any, Callable[[Any], Sequence[ToolSpec]]]:
        """Return the request for an environment's tools, and what reads its result. NoToolsError: It has none."""
        if session.is_tool_host:
            return MethodRequest("list_tools"), lambda specs: specs
        self._check(session)
        return ListToolsAction(), _read_listing

    def request_call(
        self,
        session: EnvironmentSession,
        name: str,
        arguments: Mapping[str, Any],
        context: ToolContext,
        wait: Wait = None,
    ) -> tuple[Any, Callable[[Any], ToolResult]]:
        """Return the request that calls a tool, and what makes a `ToolResult` of its result.

        Args:
            session: The environment.
            name: The tool's name.
            arguments: Its arguments.
            context: Given to a tool that takes it.
            wait: Awaits an asynchronous tool, if not plainly.

        Raises:
            NoToolsError: The environment has no tools.
            ToolRefusedError: It has no such tool, or not with such arguments.
        """
        if session.is_tool_host:
            return MethodRequest("call_tool", (name, arguments, context), wait), lambda result: result
        self._check(session)
        return CallToolAction(tool_name=name, arguments=dict(arguments)), _read_step

    def _check(self, session: EnvironmentSession) -> None:
        if not self._steps:
            raise NoToolsError(f"expected an environment with tools, got {session.name}, which offers none")


class NoToolsError(Exception):
    """The environment has no tools."""


class ToolRefusedError(PicklableError):
    """A tool is not called as asked; `result` says why."""

    def __init__(self, error_type: ToolErrorType, message: str) -> None:
        super().__init__(message)
        self.result = ToolResult.failed(error_type, message)


def _is_tool_action(action: Any) -> bool:
    """Whether an action model, or a member of a union, is `CallToolAction`."""
    if isinstance(action, type):
        return issubclass(action, CallToolAction)
    return any(_is_tool_action(argument) for argument in get_args(action))


def _find_toolset(owner: Any) -> Toolset | None:
    if owner is None or not issubclass(owner, DeclaredTools):
        return None
    if any(getattr(owner, name) is not getattr(DeclaredTools, name) for name in _LISTED):
        return None
    toolset: Toolset = owner.TOOLSET
    return toolset


def _read_listing(observation: Any) -> Sequence[ToolSpec]:
    if not isinstance(observation, ListToolsObservation):
        raise _make_type_error(ListToolsObservation, observation)
    return [ToolSpec(**tool.model_dump()) for tool in observation.tools]


def _read_step(observation: Any) -> ToolResult:
    if not isinstance(observation, CallToolObservation):
        raise _make_type_error(CallToolObservation, observation)
    result = _read(observation.result)
    return ToolResult(
        content=result.content,
        value=result.value,
        structured=result.structured,
        error=observation.error,
        reward=observation.reward,
        done=observation.done,
        truncated=outcome_of(observation).truncated,
        metadata=dict(observation.metadata or {}),
    )


def _read(value: Any) -> ToolResult:
    """Convert what a tool of a released environment returned: a plain value, or its MCP client's result as a dict."""
    if isinstance(value, dict) and isinstance(value.get("content"), list) and "data" in value:
        structured = value.get("structured_content")
        return ToolResult(
            content=value["content"],
            value=value["data"],
            structured=structured if isinstance(structured, dict) else None,
        )
    return ToolResult.of(value)


def _make_type_error(expected: type, got: object) -> TypeError:
    return TypeError(f"expected a {expected.__name__} from step, got {short(type(got).__name__)}")
