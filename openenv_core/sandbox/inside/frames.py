"""What passes between a session's interpreter and its supervisor; both ends use this.

A request is a length of four bytes and JSON. An answer is two lengths, a short header of JSON, and the texts that it
refers to by number, one after the other: so whoever forges an answer cannot make the supervisor parse megabytes.
"""

import json
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

REQUEST: Final = struct.Struct("!I")
ANSWER: Final = struct.Struct("!II")

MAX_REQUEST: Final = 96 << 20
"""Bytes of a request."""

MAX_HEADER: Final = 256 << 10
"""Bytes of an answer's header."""

MAX_VALUE: Final = 512 << 10
"""Bytes of what a called function may answer, as tagged JSON."""

# Kept here because code may replace them in their own modules.
_dumps = json.dumps
_loads = json.loads


def pack_request(message: Any) -> bytes:
    """Return the bytes of a request."""
    body = _text(message)
    return REQUEST.pack(len(body)) + body


def pack_answer(header: dict[str, Any], texts: Sequence[str]) -> bytes:
    """Return the bytes of an answer."""
    blobs = [text.encode("utf-8", "replace") for text in texts]
    head = _text({**header, "lengths": [len(blob) for blob in blobs]})
    return b"".join((ANSWER.pack(len(head), sum(map(len, blobs))), head, *blobs))


ROOT_NOTICE: Final = b"R"
"""Sent by the process whose end is the end of all."""

WORKSPACE_NOTICE: Final = b"W"
"""Sent by the interpreter with a descriptor of its workspace, where that is not the supervisor's own."""

READY_NOTICE: Final = b"I"
"""Sent by the interpreter, once nothing is left to be taken from it."""

FORK_NOTICE: Final = bytes(ANSWER.size)
"""An answer of nothing: whoever runs a request in a process of its own shows itself by it."""

REPEAT_SIGNAL: Final = signal.SIGURG
"""Repeats an interrupt. Ends nobody by default, and means nothing where the first one was in time."""

LOADER_VARIABLES: Final = ("LD_LIBRARY_PATH",)
"""Variables without which this very Python may not start. Once it has, the zygote forgets them: code has no business
with where the machine keeps its libraries."""

MAX_BRANCHES_PER_REQUEST: Final = 8
"""Branches that one request may ask for: each is sent three descriptors, and code may have few left."""


def receive_request(connection: socket.socket, descriptors: "list[int] | None" = None) -> Any:
    """Read one request, waiting for it.

    EOFError: the other end is gone; ValueError: the message is too long, or no JSON.
    """
    if descriptors is None:
        begin = b""
    else:
        begin, received, _, _ = socket.recv_fds(connection, REQUEST.size, 3 * MAX_BRANCHES_PER_REQUEST)
        descriptors += received
        if not begin:
            raise EOFError
    (length,) = REQUEST.unpack(begin + _exactly(connection, REQUEST.size - len(begin)))
    if length > MAX_REQUEST:
        raise ValueError(f"expected a request of at most {MAX_REQUEST} bytes, got one of {length}")
    return _loads(_exactly(connection, length))


def _text(message: Any) -> bytes:
    # Lone surrogates, which are no text, become question marks.
    return _dumps(message, ensure_ascii=False, separators=(",", ":"), check_circular=False).encode(
        "utf-8", "replace"
    )


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        piece = connection.recv(min(length - len(parts), 1 << 20))
        if not piece:
            raise EOFError
        parts += piece
    return bytes(parts)
