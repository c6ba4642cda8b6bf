"""What comes back of tools: in the observation of a step, or by JSON-RPC; in either casing, of whatever release."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ConfigDict, ValidationError

from openenv_core.errors import ProtocolError, ToolCallError
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.protocol.requests import encode_request
from openenv_core.tools import CallToolObservation, ListToolsObservation, Tool, ToolError, ToolErrorType
from openenv_core.types import Observation, StepResult

LIST_TOOLS: Final = "tools/list"
CALL_TOOL: Final = "tools/call"

_EXCERPT: Final = 200


class AnyObservation(Observation):
    """An observation of an environment whose model the caller does not have: its fields are attributes."""

    model_config = ConfigDict(extra="allow")


class _CallObservation(CallToolObservation):
    """A tool's observation; servers may say more than the released ones do."""

    model_config = ConfigDict(extra="allow")


class _ListObservation(ListToolsObservation):
    model_config = ConfigDict(extra="allow")


_CALLED: Final = CallToolObservation.model_fields.keys()
_LISTED: Final = ListToolsObservation.model_fields.keys()


def encode_rpc(request_id: int, method: str, params: Mapping[str, Any]) -> bytes:
    """Write the frame of a JSON-RPC request, which is about the socket's own session."""
    call = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
    return encode_request("mcp", call)


def call_params(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a call."""
    return {"name": name, "arguments": arguments}


def read_rpc(response: Mapping[str, Any], request_id: int) -> Any:
    """Return the result in a JSON-RPC response.

    Raises:
        JsonRpcFaultError: The server says that the method has failed.
        ProtocolError: It is no response, or that to another request.
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


def read_tools(listed: Any) -> list[Tool]:
    """Read the result of `tools/list`. ProtocolError: It lists no tools."""
    tools = listed.get("tools") if isinstance(listed, Mapping) else None
    if not isinstance(tools, list):
        raise ProtocolError(f"expected a list of tools from the server, got {_excerpt(listed)}")
    return [_tool(tool) for tool in tools]


def read_result(payload: Mapping[str, Any]) -> StepResult[Observation]:
    """Read the data of an observation frame, whatever the observation is. ProtocolError: It is none."""
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
    """Return the tools that a step has listed. ProtocolError: The step was answered with something else."""
    if not isinstance(step.observation, ListToolsObservation):
        raise ProtocolError(f"expected a list of tools from the server, got {_excerpt(step.observation)}")
    return step.observation.tools


def value_of(name: str, step: StepResult[Observation]) -> Any:
    """Return what a tool gave, from the result of a step. ToolCallError: The call failed."""
    observation = step.observation
    if not isinstance(observation, CallToolObservation):
        return observation  # released environments may answer the call that ends an episode with another one
    if observation.error is not None:
        raise ToolCallError(name, observation.error.error_type, observation.error.message, step)
    return _value(name, observation.result, step)


def value_of_rpc(name: str, result: Any) -> Any:
    """Return what a tool gave, from the result of `tools/call`. ToolCallError: The call failed."""
    if isinstance(result, Mapping) and "tool_name" in result:  # released servers, where tools are steps
        return value_of(name, read_result({"observation": result}))
    return _value(name, result, None)


def call_failed(name: str, fault: JsonRpcFaultError) -> ToolCallError:
    """Return what a failed `tools/call` is for the caller."""
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
    """Read why a call failed; a server may know more reasons than this client."""
    if error is None:
        return None
    error_fields = error if isinstance(error, Mapping) else {"message": error}
    return ToolError(
        error_type=_kind(error_fields.get("error_type")), message=str(error_fields.get("message", ""))
    )


def _kind(error_type: Any) -> ToolErrorType:
    known = isinstance(error_type, str) and error_type in set(ToolErrorType)
    return ToolErrorType(error_type) if known else ToolErrorType.EXECUTION_ERROR


def _tool(tool: Any) -> Tool:
    named = tool.get("name") if isinstance(tool, Mapping) else None
    if not isinstance(named, str):
        raise ProtocolError(f"expected a tool with a name, got {_excerpt(tool)}")
    schema = tool.get("input_schema") or tool.get("inputSchema") or {}
    if not isinstance(schema, Mapping):
        raise ProtocolError(f"expected a JSON schema of the tool {named!r}, got {_excerpt(schema)}")
    return Tool(name=named, description=str(tool.get("description") or ""), input_schema=dict(schema))


def _value(name: str, result: Any, step: StepResult[Observation] | None) -> Any:
    """Return the value itself: released servers wrap it into what MCP makes of it."""
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
    text = repr(value)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
