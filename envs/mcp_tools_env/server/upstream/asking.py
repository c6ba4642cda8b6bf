"""Waiting for an answer that may not come: because its time is over, or because something broke on the way."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Final, TypeVar

import mcp_types as types
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from .answers import broken, refusal, too_long
from .errors import told
from .fault import Fault

T = TypeVar("T")

LATE_S: Final = 1.0
"""What an answer may be late: the SDK watches the time too, and tells the server to stop."""

AFTER_FAULT_S: Final = 0.05
"""What an answer gets after a fault: it may be the very error that the fault is, and say more."""


class Lost(Exception):  # noqa: N818 - says what happened
    """The connection is no more."""

    def __init__(self, error: MCPError) -> None:
        super().__init__(told(error))
        self.error = error


async def asked(answer: Awaitable[T], fault: Fault, timeout_s: float) -> T:
    """Wait for an answer, for its time, or for a fault that means that it will not come.

    Raises:
        CallFailed: It does not come, or is an error.
        Lost: The connection is no more.
    """
    fault.take()  # what went wrong before is nothing of this
    began = time.monotonic()
    asking = asyncio.ensure_future(answer)
    broke = asyncio.create_task(fault.event.wait())
    try:
        await asyncio.wait([asking, broke], timeout=timeout_s + LATE_S, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done() and not broke.done():
            raise too_long(timeout_s)
        if not asking.done():
            await asyncio.wait([asking], timeout=AFTER_FAULT_S)
        return _settled(asking, fault.take(), timeout_s, time.monotonic() - began)
    finally:
        broke.cancel()
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking], timeout=LATE_S)
        if asking.done() and not asking.cancelled():
            asking.exception()  # heard, whatever it is


def _settled(asking: "asyncio.Future[T]", fault: str | None, timeout_s: float, took_s: float) -> T:
    if not asking.done():
        raise broken(fault or "it gave no answer")
    error = asking.exception()
    if error is None:
        return asking.result()
    if fault is not None:
        raise broken(fault)
    if isinstance(error, MCPError):
        if error.code == types.REQUEST_TIMEOUT and took_s >= timeout_s:
            raise too_long(timeout_s)
        if _is_loss(error):
            raise Lost(error)
        if error.code in _NO_ANSWER and error.error.message.startswith(_NO_ANSWER[error.code]):
            raise broken(told(error))
        raise refusal(error)
    if isinstance(error, ValidationError):
        raise broken(f"it answered with what is no result: {told(error)}")
    raise broken(told(error))


# A tool server may use the codes of the SDK's own errors for what it will, -32000 above all; a call that it refuses
# with one is the policy's affair. The words tell the SDK's apart.
_CLOSED: Final = "Connection closed"
_STREAM_ENDED: Final = "SSE stream "
_FORGOTTEN: Final = "Session terminated"
_NO_ANSWER: Final = {
    types.PARSE_ERROR: ("Failed to parse ",),
    types.INVALID_REQUEST: ("Unexpected content type", "server answered a request with 202"),
}


def _is_loss(error: MCPError) -> bool:
    words = error.error.message
    if error.code == types.CONNECTION_CLOSED:
        return words == _CLOSED or words.startswith(_STREAM_ENDED)
    return error.code == types.INVALID_REQUEST and words == _FORGOTTEN
