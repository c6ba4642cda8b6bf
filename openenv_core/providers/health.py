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
        connection.sendall(
            f"GET /health HTTP/1.0\r\nHost: {LOOPBACK}:{port}\r\nConnection: close\r\n{authorization}\r\n".encode()
        )
        answer = b""
        while len(answer) < ANSWER_BYTES:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("no answer in time")
            connection.settimeout(left)
            chunk = connection.recv(ANSWER_BYTES)
            if not chunk:
                break
            answer += chunk
            # Not every server closes its end after it has answered.
            if (status := _status(answer)) is not None:
                return status
    if not answer:
        raise ConnectionResetError("the connection was closed without an answer")
    raise ValueError(f"expected a status on /health, got {answer[:200]!r}")


def _status(answer: bytes) -> str | None:
    """Return the status in an answer, None where there is none, or not yet."""
    body = answer.partition(b"\r\n\r\n")[2]
    try:
        # Some send in chunks whatever the request's version: the object stands between their sizes.
        return str(json.loads(body[body.find(b"{") : body.rfind(b"}") + 1])["status"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
