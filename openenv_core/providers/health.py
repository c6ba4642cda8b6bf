"""Whether a server on this machine is healthy."""

import json
import socket
import time
from typing import Final

LOOPBACK: Final = "127.0.0.1"

ANSWER_BYTES: Final = 65_536
"""The longest answer that is read."""


def status_of(port: int, timeout_s: float) -> str:
    """Return the status that a server reports on /health.

    The time holds for the whole answer, however slowly it comes.

    Raises:
        OSError: Nobody answers.
        ValueError: What answers is no status.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((LOOPBACK, port), timeout_s) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\nHost: %s:%d\r\n\r\n" % (LOOPBACK.encode(), port))
        answer = bytearray()
        while len(answer) < ANSWER_BYTES:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("no answer in time")
            connection.settimeout(left)
            chunk = connection.recv(ANSWER_BYTES)
            if not chunk:
                break
            answer += chunk
    if not answer:
        raise ConnectionResetError("the connection was closed without an answer")
    _, _, body = bytes(answer).partition(b"\r\n\r\n")
    try:
        return str(json.loads(body)["status"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected a status on /health, got {bytes(answer[:200])!r}") from error
