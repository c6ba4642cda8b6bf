"""What every plain HTTP route answers alike: what was refused, what failed, and nothing once the client has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import Request, Response

from openenv_core.protocol.codes import CAPACITY_REACHED, VALIDATION_ERROR, Refusal
from openenv_core.protocol.jsonio import dumps
from servers.execution import end
from servers.sessions import Busy, DeadlinePassed, UnknownSession

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


def refused(refusal: Refusal) -> Response:
    """Return the answer to a request that was refused."""
    if refusal.code == VALIDATION_ERROR:
        return json_answer(dumps({"detail": refusal.extra["errors"]}), 422)
    body = dumps({"detail": {"message": refusal.message, "code": refusal.code, **refusal.extra}})
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    if refusal.code == CAPACITY_REACHED:
        return json_answer(body, 503, retry)
    if isinstance(refusal, Busy):
        return json_answer(body, 429, retry)
    if isinstance(refusal, UnknownSession):
        return json_answer(body, 404)
    return json_answer(body, 504 if isinstance(refusal, DeadlinePassed) else 500)


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer whose body is JSON already."""
    return Response(body, status, headers, "application/json")
