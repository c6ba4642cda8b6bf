"""Whether a server on this machine is healthy."""

import json
import socket
import time
from typing import Final

LOOPBACK: Final = "127.0.0.1"

ANSWER_BYTES: Final = 65_536
"""The longest answer that is read."""


def status_of(port: int, timeout_s: float, token: str | None = None) -> str:
    """Return the status that a server reports on /health.

    The time holds for the whole answer, however slowly it comes.

    Args:
        port: Where it listens, on the loopback interface.
        timeout_s: Seconds that it gets.
        token: Its bearer token.

    Raises:
        OSError: Nobody answers.
        ValueError: What answers is no status.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((LOOPBACK, port), timeout_s) as connection:
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        connection.sendall(f"GET /health HTTP/1.0\r\nHost: {LOOPBACK}:{port}\r\n{authorization}\r\n".encode())
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
