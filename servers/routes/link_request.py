"""Decodes the frames of `ropewalk.v1`."""

from collections.abc import Sequence
from typing import Any

from openenv_core.protocol import batch as wire
from openenv_core.protocol.batch import Array, FrameError
from openenv_core.protocol.errors import INVALID_JSON, RefusalError
from openenv_core.protocol.requests import RequestDecoder, RequestHead


def read_frame(
    frame: str | bytes, decoder: RequestDecoder[Any], operations: Sequence[str]
) -> tuple[RequestHead, Any, list[Array]]:
    """Return a request's head, its message of the released dialect if any, and its arrays; RefusalError: invalid."""
    if type(frame) is str and '"op"' not in frame:
        return *decoder.numbered_frame(frame), []
    try:
        header, arrays = wire.decode_frame(frame)
    except FrameError as error:
        raise RefusalError(INVALID_JSON, str(error)) from None
    if type(frame) is str and "op" not in header:
        return *decoder.numbered_frame(frame), []
    return wire.read_request(header, len(frame), operations), None, arrays


def read_request_id(frame: str | bytes) -> tuple[int | None, bool]:
    """Return the id of an invalid request, if readable, and whether it is in the released dialect (has a `type`)."""
    try:
        header, _ = wire.decode_frame(frame)
    except FrameError:
        return None, False
    request_id = header.get("id")
    return (
        (request_id, "type" in header)
        if type(request_id) is int and 0 <= request_id < 2**53
        else (None, False)
    )
