"""Decodes results of tools from observations and JSON-RPC responses, in either casing, of all releases."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ConfigDict, ValidationError

from openenv_core.errors import ProtocolError, ToolCallError
from openenv_core.protocol.errors import short
from openenv_core.protocol.frames import encode_request
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.tools import CallToolObservation, ListToolsObservation, Tool, ToolError, ToolErrorType
from openenv_core.types import Observation, StepResult

LIST_TOOLS: Final = "tools/list"
CALL_TOOL: Final = "tools/call"

_EXCERPT: Final = 200


class AnyObservation(Observation):
    """An observation without a model on the client's side: all its fields are attributes."""

    model_config = ConfigDict(extra="allow")


class _CallObservation(CallToolObservation):
    """A tool's observation, which may have more fields than a released server's."""

    model_config = ConfigDict(extra="allow")


class _ListObservation(ListToolsObservation):
    model_config = ConfigDict(extra="allow")


_CALLED: Final = CallToolObservation.model_fields.keys()
_LISTED: Final = ListToolsObservation.model_fields.keys()


def encode_rpc(request_id: int, method: str, params: Mapping[str, Any]) -> bytes:
    """Encode a frame with a JSON-RPC request for the socket's own session."""
    call = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
    return encode_request("mcp", call)


def call_params(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of `tools/call`."""
    return {"name": name, "arguments": arguments}


def read_rpc(response: Mapping[str, Any], request_id: int) -> Any:
    """Return the result in a JSON-RPC response.

    Raises:
        JsonRpcFaultError: It is an error response.
        ProtocolError: It is not a response to this request.
    """
    error = response.get("error")
    if isinstance(error, Mapping):
        raise JsonRpcFaultError(
            _code(error.get("code")), str(error.get("message") or "no reason given"), error.get("data")
        )
    if response.get("id") != request_id or "result" not in response:
        raise ProtocolError(
            f"expected the JSON-RPC response to request {request_id}, got {_excerpt(response)}; "
            "check that the URL is an OpenEnv server's"
        )
    return response["result"]


def read_tools(result: Any) -> list[Tool]:
    """Decode the result of `tools/list`. Raises `ProtocolError` if it is invalid."""
    tools = result.get("tools") if isinstance(result, Mapping) else None
    if not isinstance(tools, list):
        raise ProtocolError(f"expected a list of tools from the server, got {_excerpt(result)}")
    return [_tool(tool) for tool in tools]


def read_result(payload: Mapping[str, Any]) -> StepResult[Observation]:
    """Decode the data of any observation frame. Raises `ProtocolError` if it is invalid."""
    fields = payload.get("observation")
    if not isinstance(fields, Mapping):
        raise ProtocolError(f"expected an observation from the server, got {_excerpt(payload)}")
    observation_fields = {**fields, "reward": payload.get("reward"), "done": payload.get("done", False)}
    try:
        observation = _observation(observation_fields)
    except ValidationError as error:
        raise ProtocolError(f"expected an observation, got {_excerpt(payload)}: {error}") from error
    metadata = payload.get("metadata")
    return StepResult(
        observation, observation.reward, observation.done, metadata if isinstance(metadata, dict) else None
    )


def tools_of(step: StepResult[Observation]) -> list[Tool]:
    """Return the tools of a step that listed them. Raises `ProtocolError` for another observation."""
    if not isinstance(step.observation, ListToolsObservation):
        raise ProtocolError(f"expected a list of tools from the server, got {_excerpt(step.observation)}")
    return step.observation.tools


def value_of(name: str, step: StepResult[Observation]) -> Any:
    """Return a tool's value from the result of a step. Raises `ToolCallError` if the call failed."""
    observation = step.observation
    if not isinstance(observation, CallToolObservation):
        return observation  # a released environment may return another observation for the call that ends the episode
    if observation.error is not None:
        raise ToolCallError(name, observation.error.error_type, observation.error.message, step)
    return _value(name, observation.result, step)


def value_of_rpc(name: str, result: Any) -> Any:
    """Return a tool's value from the result of `tools/call`. Raises `ToolCallError` if the call failed."""
    if isinstance(result, Mapping) and "tool_name" in result:  # released servers, where tools are steps
        return value_of(name, read_result({"observation": result}))
    return _value(name, result, None)


def call_failed(name: str, fault: JsonRpcFaultError) -> ToolCallError:
    """Return the exception for an error response to `tools/call`."""
    error_type = fault.data.get("error_type") if isinstance(fault.data, Mapping) else None
    return ToolCallError(name, _kind(error_type), fault.message)


def _observation(fields: dict[str, Any]) -> Observation:
    tools = fields.get("tools")
    if isinstance(tools, list) and all(isinstance(tool, Mapping) and "name" in tool for tool in tools):
        fields["tools"] = [_tool(tool) for tool in tools]
        return (_ListObservation if fields.keys() - _LISTED else ListToolsObservation).model_validate(fields)
    if "tool_name" in fields:
        fields["error"] = _error(fields.get("error"))
        return (_CallObservation if fields.keys() - _CALLED else CallToolObservation).model_validate(fields)
    return AnyObservation.model_validate(fields)


def _error(error: Any) -> ToolError | None:
    """Decode why a call failed; a server may have more error types than this client."""
    if error is None:
        return None
    error_fields = error if isinstance(error, Mapping) else {"message": error}
    return ToolError(
        error_type=_kind(error_fields.get("error_type")), message=str(error_fields.get("message", ""))
    )


def _kind(error_type: Any) -> ToolErrorType:
    is_known = isinstance(error_type, str) and error_type in set(ToolErrorType)
    return ToolErrorType(error_type) if is_known else ToolErrorType.EXECUTION_ERROR


def _tool(tool: Any) -> Tool:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if not isinstance(name, str):
        raise ProtocolError(f"expected a tool with a name, got {_excerpt(tool)}")
    schema = tool.get("input_schema") or tool.get("inputSchema") or {}
    if not isinstance(schema, Mapping):
        raise ProtocolError(f"expected a JSON schema of the tool {name!r}, got {_excerpt(schema)}")
    return Tool(name=name, description=str(tool.get("description") or ""), input_schema=dict(schema))


def _value(name: str, result: Any, step: StepResult[Observation] | None) -> Any:
    """Return the value itself; released servers wrap it in an MCP result."""
    if not isinstance(result, Mapping):
        return result
    content, failed = result.get("content"), result.get("is_error", result.get("isError"))
    if not isinstance(content, list) or not isinstance(failed, bool):
        return result
    texts = [
        str(block.get("text", ""))
        for block in content
        if isinstance(block, Mapping) and block.get("type") == "text"
    ]
    if failed:
        message = "\n".join(texts) or "the tool gave no reason"
        raise ToolCallError(name, ToolErrorType.EXECUTION_ERROR, message, step)
    if result.get("data") is not None:
        return result["data"]
    structured = result.get("structured_content", result.get("structuredContent"))
    if isinstance(structured, Mapping):
        return structured["result"] if set(structured) == {"result"} else structured
    if len(texts) == len(content):
        return "\n".join(texts) if texts else None
    return content


def _code(code: Any) -> int:
    return code if isinstance(code, int) else 0


def _excerpt(value: object) -> str:
    return short(repr(value), _EXCERPT)
