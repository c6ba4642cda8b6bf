"""Messages between an interpreter and its supervisor, used by both.

A request is a frame's header. An answer is a short header, and the texts that the header lists, one after the other.
The header's size is limited, so a forged answer cannot make the supervisor parse megabytes.
"""

import socket
from collections.abc import Sequence
from typing import Any, Final

from openenv_core.sandbox.inside.interpreter import FRAME, pack, receive

MAX_HEADER: Final = 256 << 10
"""Maximum size of an answer's header, in bytes."""

MAX_VALUE: Final = 512 << 10
"""Maximum size of a called function's value as tagged JSON, in bytes."""


def pack_answer(header: dict[str, Any], texts: Sequence[str]) -> bytes:
    """Return the bytes of an answer."""
    blobs = [text.encode("utf-8", "replace") for text in texts]
    return pack({**header, "lengths": [len(blob) for blob in blobs]}, b"".join(blobs))


STOP: Final = b"s"
RESUME: Final = b"r"
"""Sent to a session's init process, which stops or resumes all others and sends the byte back."""

ROOT_NOTICE: Final = b"R"
"""Sent by the first process, with which all others end."""

WORKSPACE_NOTICE: Final = b"W"
"""Sent by the interpreter with a descriptor of its workspace, if that is not in the supervisor's file system."""

READY_NOTICE: Final = b"I"
"""Sent by the interpreter once it is fully confined."""

FORK_NOTICE: Final = bytes(FRAME.size)
"""An empty answer, by which a fork that runs a request announces itself."""

LOADER_VARIABLES: Final = ("LD_LIBRARY_PATH",)
"""Variables without which this Python may not start. The zygote then removes them: code does not need to know where
the machine keeps its libraries."""

MAX_BRANCHES_PER_REQUEST: Final = 8
"""Maximum number of branches per request: each is sent three descriptors, and code may have few left."""


def receive_request(connection: socket.socket) -> tuple[Any, list[int]]:
    """Wait for one request; return it and the descriptors sent along.

    Raises:
        EOFError: The other end is closed.
    """
    descriptors: list[int] = []

    def read(size: int) -> bytes:
        data, received, _, _ = socket.recv_fds(connection, size, 3 * MAX_BRANCHES_PER_REQUEST)
        descriptors.extend(received)
        return data

    return receive(read)[0], descriptors
