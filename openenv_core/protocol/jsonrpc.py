"""JSON-RPC 2.0 as in the released protocol: no batches, and `data` in every error."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError
from pydantic_core import from_json

from openenv_core.errors import PicklableError
from openenv_core.protocol.errors import faults_of
from openenv_core.protocol.jsonio import dumps

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
SERVER_ERROR: Final = -32000
CODES: Final = (PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR, SERVER_ERROR)


class JsonRpcFaultError(PicklableError):
    """An error response to a request."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class RpcRequest(BaseModel):
    """One request."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    jsonrpc: Literal["2.0"]
    id: StrictInt | StrictStr | None = None
    method: StrictStr
    params: Annotated[dict[str, Any], Field(default_factory=dict)]


def parse(text: str | bytes) -> Any:
    """Parse the JSON of a request. Raises `JsonRpcFaultError` with PARSE_ERROR."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise JsonRpcFaultError(PARSE_ERROR, f"expected a JSON object that can be read: {error}") from None


def read(value: Any, size: int) -> RpcRequest:
    """Validate a parsed request; `size` is the length of its JSON.

    Raises:
        JsonRpcFaultError: PARSE_ERROR (also for batches) or INVALID_REQUEST.
    """
    if not isinstance(value, dict):
        kind = "a batch" if isinstance(value, list) else type(value).__name__
        raise JsonRpcFaultError(PARSE_ERROR, f"expected a single JSON-RPC request, got {kind}")
    try:
        return RpcRequest.model_validate(value)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults_of(error, size)
        )
        raise JsonRpcFaultError(
            INVALID_REQUEST, f"expected a JSON-RPC 2.0 request, got one with faults: {faults}"
        ) from None


def encode_result(request_id: int | str | None, result: Any) -> bytes:
    """Encode the response of a successful method."""
    return dumps({"jsonrpc": "2.0", "id": request_id, "result": result})


def encode_fault(request_id: int | str | None, fault: JsonRpcFaultError) -> bytes:
    """Encode the response of a failed request."""
    # Text of exceptions may contain lone surrogates, which UTF-8 cannot encode.
    message = fault.message.encode("utf-8", "replace").decode("utf-8")
    error = {"code": fault.code, "message": message, "data": fault.data}
    return dumps({"jsonrpc": "2.0", "id": request_id, "error": error})
