"""Logging of a server: for its operator, without tokens, and without messages that strangers can provoke."""

import asyncio
import logging
from collections.abc import Iterable

LEVELS = ("critical", "error", "warning", "info", "debug")

_CLIENT_FAULTS = (
    "Invalid HTTP request",
    "Invalid UTF-8 sequence",
    "Unsupported upgrade request",
    # Wrong: the handshake was refused with an HTTP response, which uvicorn does not take into account.
    "ASGI callable returned without completing handshake",
)
"""Prefixes of messages, some with a traceback, that uvicorn logs for a client's mistake."""


def configure_logging(level: str, secrets: Iterable[str] = ()) -> None:
    """Log this process's messages to standard error.

    Args:
        level: One of LEVELS. At `debug`, clients' mistakes and the events of each connection are logged too.
        secrets: Strings that are replaced wherever they would appear.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    debug = number <= logging.DEBUG
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("servers").setLevel(number)
    # At `info` it logs two lines for each session, and the metrics have their numbers.
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.setLevel(number if debug else max(number, logging.WARNING))
    if not debug:
        uvicorn.addFilter(_is_own_record)


def _is_own_record(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False  # of a connection ended by the server's shutdown
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
