"""JSON-RPC and the frames that carry it, as the released package's models have them."""

from enum import IntEnum, StrEnum
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.jsonio import dumps

_FORBID: Final = ConfigDict(extra="forbid")


class JsonRpcErrorCode(IntEnum):
    """What can be wrong with a request."""

    PARSE_ERROR = jsonrpc.PARSE_ERROR
    INVALID_REQUEST = jsonrpc.INVALID_REQUEST
    METHOD_NOT_FOUND = jsonrpc.METHOD_NOT_FOUND
    INVALID_PARAMS = jsonrpc.INVALID_PARAMS
    INTERNAL_ERROR = jsonrpc.INTERNAL_ERROR
    SERVER_ERROR = jsonrpc.SERVER_ERROR


_TEXTS: Final = {
    JsonRpcErrorCode.PARSE_ERROR: "Parse error",
    JsonRpcErrorCode.INVALID_REQUEST: "Invalid Request",
    JsonRpcErrorCode.METHOD_NOT_FOUND: "Method not found",
    JsonRpcErrorCode.INVALID_PARAMS: "Invalid params",
    JsonRpcErrorCode.INTERNAL_ERROR: "Internal error",
    JsonRpcErrorCode.SERVER_ERROR: "Server error",
}


class McpMethod(StrEnum):
    """The methods of tools."""

    TOOLS_LIST = "tools/list"
    TOOLS_CALL = "tools/call"


class JsonRpcError(BaseModel):
    """What was wrong."""

    model_config = _FORBID

    code: int
    message: str
    data: Any = None

    @classmethod
    def from_code(
        cls, code: JsonRpcErrorCode, message: str | None = None, data: Any = None
    ) -> "JsonRpcError":
        """Return an error; without a message, with the words that JSON-RPC has for the code."""
        return cls(code=int(code), message=message or _TEXTS.get(code, "Unknown error"), data=data)


class JsonRpcRequest(BaseModel):
    """One request."""

    model_config = _FORBID

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


class JsonRpcResponse(BaseModel):
    """One response: a result or an error, never both on the wire."""

    model_config = _FORBID

    jsonrpc: Literal["2.0"] = "2.0"
    result: Any = None
    error: JsonRpcError | None = None
    id: str | int | None = None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return what goes onto the wire."""
        whole = super().model_dump(**options)
        told = "error" if self.error is not None else "result"
        return {name: whole[name] for name in ("jsonrpc", "id", told) if name in whole}

    def model_dump_json(self, **options: Any) -> str:
        """Return the JSON that goes onto the wire."""
        return dumps(self.model_dump(mode="json")).decode()

    @classmethod
    def success(cls, result: Any, request_id: str | int | None = None) -> "JsonRpcResponse":
        """Return the response of a method that has succeeded."""
        return cls(result=result, id=request_id)

    @classmethod
    def error_response(
        cls,
        code: JsonRpcErrorCode,
        message: str | None = None,
        data: Any = None,
        request_id: str | int | None = None,
    ) -> "JsonRpcResponse":
        """Return the response of a method that has failed."""
        return cls(error=JsonRpcError.from_code(code, message, data), id=request_id)


class WSMCPMessage(BaseModel):
    """A frame with a request."""

    model_config = _FORBID

    type: Literal["mcp"] = "mcp"
    data: dict[str, Any]


class WSMCPResponse(BaseModel):
    """A frame with a response."""

    model_config = _FORBID

    type: str = "mcp"
    data: dict[str, Any]
