"""Limits of a call's arguments, in general and by a tool's JSON schema, and of the rate of messages."""

import asyncio
import json
import logging
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from openenv_core.protocol.jsonio import dumps

logger = logging.getLogger(__name__)

MAX_SCHEMA_BYTES: Final = 256 << 10

CHECK_CPU_S: Final = 0.5
"""The CPU time of one validation; beyond that the check is left to the tool server."""

_VALIDATOR: Final = Path(__file__).with_name("validator.py")


class ArgumentChecker:
    """Validates arguments by JSON schemas in a process, which a schema or a pattern without end ends.

    Args:
        cpu_s: The limit of CPU time of one validation.
    """

    def __init__(self, cpu_s: float = CHECK_CPU_S) -> None:
        self._command = (sys.executable, "-P", str(_VALIDATOR), str(cpu_s))
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None
        self._thread = ThreadPoolExecutor(1, "argument checks")

    async def find_faults(self, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str] | None:
        """Return messages on what is wrong with the arguments; None if they cannot be checked within the limits."""
        try:
            schema_text = json.dumps(schema)
        except RecursionError:
            return None
        if len(schema_text) > MAX_SCHEMA_BYTES:
            return None
        request = f"[{schema_text}, {json.dumps(arguments)}]\n".encode()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._check, request)

    def start(self) -> "subprocess.Popen[bytes]":
        """Return the process, started if it is not running, without waiting for it."""
        process = self._process
        if process is None:
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process, self._end = process, weakref.finalize(self, _end, process)
        return process

    def close(self) -> None:
        """End the process; a later check starts another."""
        if self._process is not None:
            self._process = None
            self._end()

    def _check(self, request: bytes) -> list[str] | None:
        try:
            process = self.start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            if answer := process.stdout.readline():
                faults: list[str] | None = json.loads(answer)
                return faults
        except (OSError, ValueError) as error:  # ended, or closed meanwhile
            logger.warning("arguments cannot be checked: %s", error)
        self.close()  # it has exceeded its CPU time
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
MAX_NUMBER: Final = 1 << 1023
"""The largest integer that every JSON parser can be expected to read; it has 308 digits."""


def describe_unsendable(arguments: Mapping[str, Any]) -> str | None:
    """Return why arguments cannot be sent to any tool; None if they can."""
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                next_level += value.values()
            elif isinstance(value, list | tuple):
                next_level += value
            elif isinstance(value, int) and abs(value) > MAX_NUMBER:
                return f"expected numbers of at most {MAX_NUMBER.bit_length()} bits, got one of {value.bit_length()}"
        level = next_level
        if not level:
            break
    else:
        return f"expected arguments of at most {MAX_DEPTH} levels, got more"
    try:
        size = len(dumps(arguments))
    except ValueError as error:
        return f"expected arguments that JSON can carry, got: {str(error)[:200]}"
    return None if size <= MAX_BYTES else f"expected arguments of at most {MAX_BYTES} bytes, got {size}"


MESSAGES_A_SECOND: Final = 2000
"""The maximum rate of messages from a tool server; beyond it, reading pauses."""


class MessageThrottle:
    """Limits the rate of messages by pausing the reader, which applies backpressure to the server."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._count = 0

    async def wait(self, messages: int = 1) -> None:
        """Count messages, and pause if the rate limit is exceeded."""
        self._count += messages
        if self._count < MESSAGES_A_SECOND:
            return
        pause_s = self._start + self._count / MESSAGES_A_SECOND - time.monotonic()
        await asyncio.sleep(max(0.0, pause_s))
        self._start, self._count = time.monotonic(), 0
