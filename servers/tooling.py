"""The tools of an environment, however it has them: as methods of its own, or as actions of its step."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, get_args

from openenv_core.outcomes import was_truncated
from openenv_core.protocol.errors import short
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    DeclaredTools,
    ListToolsAction,
    ListToolsObservation,
    ToolContext,
    ToolResult,
    Toolset,
    ToolSpec,
    is_tool_host,
)
from servers.execution import EnvironmentRunner, Factory

_LISTING_METHODS = ("list_tools", "list_resources", "list_resource_templates", "list_prompts")

METHODS: Mapping[str, str] = {
    "resources": "list_resources",
    "prompts": "list_prompts",
    "completions": "complete",
}
"""By which method a host shows that it has more than tools."""


class Tooling:
    """How the tools of an environment are listed and called.

    Attributes:
        toolset: What there is to list, where the class says so and no instance says otherwise.
    """

    def __init__(self, factory: Factory, action: Any) -> None:
        self._owner = factory if isinstance(factory, type) else None
        self._steps = _is_tool_action(action)
        self.toolset = _find_toolset(self._owner)

    @property
    def possible(self) -> bool:
        """Whether there may be tools; where the environment is made by a function, only an instance shows."""
        return self._owner is None or self._steps or is_tool_host(self._owner)

    def offers(self, feature: str) -> bool:
        """Whether there may be resources, prompts or completions too."""
        if (toolset := self.toolset) is not None:
            return bool(
                {
                    "resources": toolset.resources or toolset.templates,
                    "prompts": toolset.prompts,
                    "completions": toolset.completions,
                }[feature]
            )
        return self._owner is None or (
            is_tool_host(self._owner) and callable(getattr(self._owner, METHODS[feature], None))
        )

    def has_tools(self, runner: EnvironmentRunner) -> bool:
        """Whether this environment has tools to list and to call."""
        return runner.is_tool_host or self._steps

    def declared_tools(self) -> Sequence[ToolSpec] | None:
        """Return the tools, where the class alone tells them."""
        return None if self.toolset is None else [tool.spec for tool in self.toolset.tools.values()]

    def list_declared(self, method: str) -> Sequence[Any] | None:
        """Return what another of the listing methods returns, where the class alone tells it."""
        if (toolset := self.toolset) is None:
            return None
        declared: Mapping[str, Mapping[str, Any]] = {
            "list_resources": toolset.resources,
            "list_resource_templates": toolset.templates,
            "list_prompts": toolset.prompts,
        }
        return [each.spec for each in declared[method].values()]

    async def list(self, runner: EnvironmentRunner) -> Sequence[ToolSpec]:
        """Return the tools. NoToolsError: there are none; Exception: whatever the environment raised."""
        if runner.is_tool_host:
            return await runner.call("list_tools")  # type: ignore[no-any-return]
        self._check(runner)
        observation = await runner.step(ListToolsAction())
        if not isinstance(observation, ListToolsObservation):
            raise _make_type_error(ListToolsObservation, observation)
        return [ToolSpec(**tool.model_dump()) for tool in observation.tools]

    async def begin(
        self, runner: EnvironmentRunner, name: str, arguments: Mapping[str, Any], context: ToolContext
    ) -> ToolResult | Awaitable[ToolResult]:
        """Call a tool, up to its first wait: what is returned may be awaitable, as with `EnvironmentRunner.begin`.

        Raises:
            NoToolsError: There are none.
            Exception: Whatever the environment raised, beside what is in the result.
        """
        if runner.is_tool_host:
            return await runner.begin("call_tool", name, arguments, context)  # type: ignore[no-any-return]
        self._check(runner)
        call = _step(runner, CallToolAction(tool_name=name, arguments=dict(arguments)))
        return call if runner.plan.step_async else await call

    def _check(self, runner: EnvironmentRunner) -> None:
        if not self._steps:
            raise NoToolsError(f"expected an environment with tools, got {runner.name}, which offers none")


class NoToolsError(Exception):
    """The environment has no tools."""


def _is_tool_action(action: Any) -> bool:
    """Whether an action model, or one of a union, is the call of a tool."""
    if isinstance(action, type):
        return issubclass(action, CallToolAction)
    return any(_is_tool_action(argument) for argument in get_args(action))


def _find_toolset(owner: Any) -> Toolset | None:
    if owner is None or not issubclass(owner, DeclaredTools):
        return None
    if any(getattr(owner, name) is not getattr(DeclaredTools, name) for name in _LISTING_METHODS):
        return None
    toolset: Toolset = owner.TOOLSET
    return toolset


async def _step(runner: EnvironmentRunner, action: CallToolAction) -> ToolResult:
    observation = await runner.step(action)
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
        truncated=was_truncated(observation),
        metadata=dict(observation.metadata or {}),
    )


def _read(value: Any) -> ToolResult:
    """Return what a released environment's tool returned: a plain value, or what its MCP client made of one."""
    if isinstance(value, dict) and isinstance(value.get("content"), list) and "data" in value:
        structured = value.get("structured_content")
        return ToolResult(
            content=value["content"],
            value=value["data"],
            structured=structured if isinstance(structured, dict) else None,
        )
    return ToolResult.of(value)


def _make_type_error(wanted: type, got: object) -> TypeError:
    return TypeError(f"expected a {wanted.__name__} from step, got {short(type(got).__name__)}")
