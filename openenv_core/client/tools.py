"""MCPToolClient: a client of environments whose actions are tool calls."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from openenv_core.client.env_client import EnvClient, waits_without_loop
from openenv_core.errors import ServerError, ValidationFailedError
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.protocol.toolcalls import (
    CALL_TOOL,
    LIST_TOOLS,
    call_failed,
    call_params,
    encode_rpc,
    read_result,
    read_rpc,
    read_tools,
    tools_of,
    value_of,
    value_of_rpc,
)
from openenv_core.tools import CallToolAction, ListToolsAction, Tool
from openenv_core.tools.specs import openai_tools
from openenv_core.types import Action, Observation, State, StepResult

AnyAction: TypeAlias = Action | Mapping[str, Any]


class MCPToolClient(EnvClient[AnyAction, Observation, State]):
    """A session on a tool server, ours or a released one, over one connection.

    A call is a step of the episode: `call_tool` returns the tool's value,
    `step(CallToolAction(tool_name=..., arguments={...}))` also the reward and whether the episode is done. Servers in
    production mode have no steps, and environments with other actions may not accept tool calls as actions; there
    calls are sent as JSON-RPC, in the same session.

    Concurrent calls are safe; the environment gets them one at a time.

    With `mode="production"` calls are never sent as steps. The other arguments are those of `EnvClient`.
    """

    _tools_cache: list[Tool] | None = None
    _refuses_steps = False  # the server has refused a call that was sent as a step
    _last_request_id = 0

    async def reset(self, **options: Any) -> StepResult[Observation]:
        """Start an episode; see `EnvClient.reset`. Its tools may differ from the last one's."""
        self._tools_cache = None
        return await super().reset(**options)

    @waits_without_loop
    async def list_tools(self, use_cache: bool = True) -> list[Tool]:
        """Return the environment's tools. Listing them is not a step of the episode.

        Args:
            use_cache: Return this episode's cached list, if any.

        Raises:
            ServerError: The server has no tools, or cannot list them.
            OpenEnvError: As `EnvClient.step`.
        """
        if self._tools_cache is None or not use_cache:
            self._tools_cache = await self._fetch_tools()
        return list(self._tools_cache)

    @waits_without_loop
    async def call_tool(self, tool: str | None = None, /, **arguments: Any) -> Any:
        """Call a tool and return its value.

        Args:
            tool: Name of the tool. `name=` works too, as in the released client; but given by position, an argument
                of the tool may be called `name`.
            arguments: The tool's arguments, by the names in its schema.

        Raises:
            ToolCallError: The tool or its call failed; `error_type` says how. It is a RuntimeError too.
            OpenEnvError: As `EnvClient.step`. After a ServerError the episode may be over.
        """
        name = arguments.pop("name", None) if tool is None else tool
        if not isinstance(name, str):
            raise TypeError(
                f'expected the name of a tool, got {name!r}; write call_tool("name", argument=value)'
            )
        refusal: ValidationFailedError | None = None
        if self._calls_by_steps:
            try:
                step = await self.step(CallToolAction(tool_name=name, arguments=arguments))
            except ValidationFailedError as error:
                refusal = error  # not for its arguments, which may be any: the server takes no calls as steps
            else:
                return value_of(name, step)
        try:
            result = await self._call_rpc(CALL_TOOL, call_params(name, arguments))
        except JsonRpcFaultError as fault:
            raise call_failed(name, fault) from refusal
        self._refuses_steps = True
        return value_of_rpc(name, result)

    @waits_without_loop
    async def get_tool(self, name: str) -> Tool | None:
        """Return a tool by its name; None if there is none."""
        return next((tool for tool in await self.list_tools() if tool.name == name), None)

    @waits_without_loop
    async def has_tool(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return await self.get_tool(name) is not None

    @waits_without_loop
    async def openai_tools(self, use_cache: bool = True) -> list[dict[str, Any]]:
        """Return the tools as function schemas for chat templates; see `openenv_core.tools.specs.openai_tools`."""
        return openai_tools(await self.list_tools(use_cache))

    @property
    def _calls_by_steps(self) -> bool:
        return self._mode == "simulation" and not self._refuses_steps

    async def _fetch_tools(self) -> list[Tool]:
        """List the tools, by JSON-RPC first: released servers may leave out schemas in the reply to a step."""
        try:
            return read_tools(await self._call_rpc(LIST_TOOLS, {}))
        except JsonRpcFaultError as fault:
            error: ServerError = ServerError(fault.message, str(fault.code), {"data": fault.data})
        except ValidationFailedError as unknown:  # from releases before 0.3, which do not know the frame
            error = unknown
        if not self._calls_by_steps:
            raise error
        try:
            return tools_of(await self.step(ListToolsAction()))
        except ValidationFailedError:
            raise error from None

    async def _call_rpc(self, method: str, params: Mapping[str, Any]) -> Any:
        self._last_request_id = request_id = self._last_request_id + 1
        frame = encode_rpc(request_id, method, params)
        response = await self._session.request(frame, "mcp", read_only=method == LIST_TOOLS)
        return read_rpc(response, request_id)

    def _step_payload(self, action: AnyAction) -> dict[str, Any]:
        if not isinstance(action, Action):
            return dict(super()._step_payload(action))
        return action.model_dump(exclude=None if action.metadata else {"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Observation]:
        return read_result(payload)
