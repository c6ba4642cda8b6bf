"""Bodies of requests: whether they say that they are JSON, and how one is read into a model."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from openenv_core.protocol.requests import invalid_body, read_json, validate

ModelT = TypeVar("ModelT", bound=BaseModel)


async def json_body(request: Request) -> bytes:
    """Return the body, which the guard has bounded.

    Raises:
        Refusal: VALIDATION_ERROR: it says that it is no JSON.
    """
    body = await request.body()
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if body and not is_json:
        raise invalid_body(f"expected a body of type application/json, got {kind}")
    return body


async def read_model(request: Request, model: type[ModelT]) -> ModelT:
    """Read the body into a model. The framework would list every fault of a body that has a million of them.

    Raises:
        Refusal: VALIDATION_ERROR.
    """
    body = await json_body(request)
    data: Any = read_json(body)
    return validate(model, data, len(body))
