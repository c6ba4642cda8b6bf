"""What a server prints: what its operator needs, nothing that a stranger can make it print, and no token."""

import asyncio
import logging
from collections.abc import Iterable

LEVELS = ("critical", "error", "warning", "info", "debug")

_CLIENT_FAULTS = (
    "Invalid HTTP request",
    "Invalid UTF-8 sequence",
    "Unsupported upgrade request",
    # It has not: the handshake was refused in a response of its own, which uvicorn does not count.
    "ASGI callable returned without completing handshake",
)
"""Beginnings of what uvicorn logs, some of it with a traceback, of a caller's mistake."""


def configure_logging(level: str, secrets: Iterable[str] = ()) -> None:
    """Print this process's log on standard error.

    Args:
        level: One of LEVELS. At `debug` callers' mistakes and the life of each connection show.
        secrets: Are replaced wherever they would appear.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    debug = number <= logging.DEBUG
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("servers").setLevel(number)
    # Two lines for each session at `info`, and the figures are in the metrics.
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.setLevel(number if debug else max(number, logging.WARNING))
    if not debug:
        uvicorn.addFilter(_is_own_record)


def _is_own_record(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False  # a connection that was ended with the server
    return not str(record.msg).startswith(_CLIENT_FAULTS)


class _Formatter(logging.Formatter):
    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in self._secrets:
            text = text.replace(secret, "[token]")
        return text
