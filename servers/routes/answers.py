"""What every plain HTTP route reads and answers alike: bodies, refusals, failures."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from openenv_core.errors import EnvironmentFailureError
from openenv_core.protocol.errors import CAPACITY_REACHED, VALIDATION_ERROR, RefusalError, text_of
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.requests import invalid_body, read_json, validate
from openenv_core.tracebacks import authors_part
from servers.execution import end
from servers.sessions import DeadlineExceededError, SessionBusyError, UnknownSessionError

CLIENT_LEFT = 499
"""The status in the log of a request whose client left before its reply; nobody reads it."""

RETRY_AFTER_S = 1


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run `work`, but cancel it when the client leaves."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLIENT_LEFT)
    finally:
        await end(watch)
        await end(task)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refused(refusal: RefusalError) -> Response:
    """Return the answer to a request that was refused."""
    if refusal.code == VALIDATION_ERROR:
        return json_answer(dumps({"detail": refusal.extra["errors"]}), 422)
    body = dumps({"detail": {"message": refusal.message, "code": refusal.code, **refusal.extra}})
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    if refusal.code == CAPACITY_REACHED:
        return json_answer(body, 503, retry)
    if isinstance(refusal, SessionBusyError):
        return json_answer(body, 429, retry)
    if isinstance(refusal, UnknownSessionError):
        return json_answer(body, 404)
    return json_answer(body, 504 if isinstance(refusal, DeadlineExceededError) else 500)


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer whose body is JSON already."""
    return Response(body, status, headers, "application/json")


ModelT = TypeVar("ModelT", bound=BaseModel)


async def json_body(request: Request) -> bytes:
    """Return the body, which the guard has bounded.

    Raises:
        RefusalError: VALIDATION_ERROR: it says that it is no JSON.
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
        RefusalError: VALIDATION_ERROR.
    """
    body = await json_body(request)
    data: Any = read_json(body)
    return validate(model, data, len(body))


logger = logging.getLogger("servers")


def reported(error: BaseException, what: str = "the environment raised") -> str:
    """Log an exception of an environment, and return what its caller is told.

    Args:
        error: The exception. One that an environment raises to refuse something is none of the operator's business.
        what: What happened, for the log.
    """
    if isinstance(error, EnvironmentFailureError):
        logger.debug("the environment refused: %s", error)
    else:
        traceback = authors_part(error) or error.__traceback__
        logger.error("%s", what, exc_info=(type(error), error, traceback))
    return text_of(error)
