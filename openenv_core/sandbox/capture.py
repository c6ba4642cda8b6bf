"""What code writes to one of its streams: read as it comes, kept up to a bound, counted beyond."""

import asyncio
import os
from collections.abc import Callable
from typing import Final

_CHUNK: Final = 1 << 16
_TURNS: Final = 8
"""Chunks that are read before others have their turn."""


class Capture:
    """One pipe.

    Args:
        descriptor: Its reading end; closed by `close`.
        keep: Bytes of one execution that are kept.
        wrote: Called with the number of bytes whenever some came.
    """

    def __init__(self, descriptor: int, keep: int, wrote: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._keep = keep
        self._wrote = wrote
        self._kept = bytearray()
        self._total = 0
        self._open = True
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._readable)

    def take(self) -> tuple[str, bool]:
        """Return what was kept since the last time, and whether it is less than what was written."""
        if self._open:
            # What was written before the answer is in the pipe, and the pipe holds no more than this.
            self._read(2 * _TURNS + 1)
        text, cut = self._kept.decode("utf-8", "replace"), self._total > len(self._kept)
        self._kept, self._total = bytearray(), 0
        return text, cut

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def _readable(self) -> None:
        self._read(_TURNS)

    def _read(self, turns: int) -> None:
        for _ in range(turns):
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self._total += len(data)
            if (room := self._keep - len(self._kept)) > 0:
                self._kept += data[:room]
            self._wrote(len(data))
            if not self._open:
                return
