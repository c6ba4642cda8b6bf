"""Wire format between an interpreter and its supervisor, used by both.

A request is a four-byte length and JSON. An answer is two lengths, a short JSON header, and the texts that the header
lists, one after the other. The header's size is limited, so a forged answer cannot make the supervisor parse megabytes.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

from openenv_core.sandbox.inside.interpreter import read_exactly

REQUEST: Final = struct.Struct("!I")
ANSWER: Final = struct.Struct("!II")

MAX_REQUEST: Final = 96 << 20
"""Maximum size of a request, in bytes."""

MAX_HEADER: Final = 256 << 10
"""Maximum size of an answer's header, in bytes."""

MAX_VALUE: Final = 512 << 10
"""Maximum size of a called function's value as tagged JSON, in bytes."""

# Kept here, because code may replace them in their own modules.
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


STOP: Final = b"s"
RESUME: Final = b"r"
"""Sent to a session's init process, which stops or resumes all others and sends the byte back."""

ROOT_NOTICE: Final = b"R"
"""Sent by the first process, with which all others end."""

WORKSPACE_NOTICE: Final = b"W"
"""Sent by the interpreter with a descriptor of its workspace, if that is not in the supervisor's file system."""

READY_NOTICE: Final = b"I"
"""Sent by the interpreter once it is fully confined."""

FORK_NOTICE: Final = bytes(ANSWER.size)
"""An empty answer, by which a fork that runs a request announces itself."""

LOADER_VARIABLES: Final = ("LD_LIBRARY_PATH",)
"""Variables without which this Python may not start. The zygote then removes them: code does not need to know where
the machine keeps its libraries."""

MAX_BRANCHES_PER_REQUEST: Final = 8
"""Maximum number of branches per request: each is sent three descriptors, and code may have few left."""


def receive_request(connection: socket.socket, descriptors: "list[int] | None" = None) -> Any:
    """Wait for one request and return it.

    Args:
        connection: The socket to read from.
        descriptors: Extended by the descriptors sent along, if given.

    Raises:
        EOFError: The other end is closed.
        ValueError: The message is too long, or not JSON.
    """
    if descriptors is None:
        begin = b""
    else:
        begin, received, _, _ = socket.recv_fds(connection, REQUEST.size, 3 * MAX_BRANCHES_PER_REQUEST)
        descriptors += received
        if not begin:
            raise EOFError
    (length,) = REQUEST.unpack(begin + read_exactly(connection.recv, REQUEST.size - len(begin)))
    if length > MAX_REQUEST:
        raise ValueError(f"expected a request of at most {MAX_REQUEST} bytes, got one of {length}")
    return _loads(read_exactly(connection.recv, length))


def _text(message: Any) -> bytes:
    # Lone surrogates, which UTF-8 cannot encode, become question marks.
    return _dumps(message, ensure_ascii=False, separators=(",", ":"), check_circular=False).encode(
        "utf-8", "replace"
    )
