"""How many values a message holds, counted before it is parsed, and how many messages come in a second.

Values cost far more memory and time than the bytes that they are written with: 32 MB of empty lists would keep the
environment's loop for ten seconds. Only the loop of one session may have to wait for its tool server.
"""

import asyncio
import time
from typing import Final

MAX_VALUES: Final = 1 << 18
"""Of one message."""

MESSAGES_A_SECOND: Final = 2000
"""Of one tool server; after so many it waits for the second to end."""

_BEFORE_A_VALUE: Final = (b"[", b"{", b",")


class Weight:
    """Counts the values of one JSON text that comes in pieces."""

    def __init__(self) -> None:
        self.values = 0
        self._within = False
        self._escape = b""

    def add(self, data: bytes) -> bool:
        """Count a piece; return whether there are still few enough.

        What stands within strings does not count; every quote there has a backslash before it.
        """
        data = self._escape + data
        self._escape = b"\\" if _ends_in_an_escape(data) else b""
        if self._escape:
            data = data[:-1]
        if b"\\" in data:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = data.split(b'"', 2 * MAX_VALUES + 2)
        for piece in pieces[self._within :: 2]:
            self.values += sum(map(piece.count, _BEFORE_A_VALUE))
        self._within ^= len(pieces) % 2 == 0
        return self.values <= MAX_VALUES and len(pieces) <= 2 * MAX_VALUES


def _ends_in_an_escape(data: bytes) -> bool:
    return (len(data) - len(data.rstrip(b"\\"))) % 2 == 1


class Pace:
    """Lets so many messages pass in a second, and keeps the others waiting, and with them whoever sends them."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._passed = 0

    async def keep(self, messages: int = 1) -> None:
        """Wait where there were too many."""
        self._passed += messages
        if self._passed < MESSAGES_A_SECOND:
            return
        left = self._began + self._passed / MESSAGES_A_SECOND - time.monotonic()
        await asyncio.sleep(max(0.0, left))
        self._began, self._passed = time.monotonic(), 0
