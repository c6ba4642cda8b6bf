"""The frames sent to one client, of which some are kept in case it has to read them again."""

from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

MAX_KEPT_FRAMES: Final = 2048
MAX_KEPT_BYTES: Final = 64 * 1024 * 1024
MAX_ALL_KEPT_BYTES: Final = 1024 * 1024 * 1024
"""Limits on the frames kept for one client, and for all together.

Where all together keep more, none keeps more than an equal share. A client's latest frame is always kept.
"""


class _Client(Protocol):
    frames: "SentFrames"


class SentFrames:
    """Frames in the order of sending, numbered from 0.

    Args:
        clients: The clients that share the memory for kept frames.

    Attributes:
        count: Frames sent so far, including those that are not kept.
    """

    def __init__(self, clients: Mapping[str, _Client]) -> None:
        self.count = 0
        self._clients = clients
        self._kept: deque[str | bytes] = deque()  # the latest ones, without a gap
        self._kept_bytes = 0

    def keep(self, frame: str | bytes) -> None:
        """Count a frame and keep it; drop the oldest ones beyond the limits."""
        self.count += 1
        kept = self._kept
        kept.append(frame)
        self._kept_bytes += len(frame)
        while len(kept) > 1 and (len(kept) > MAX_KEPT_FRAMES or self._exceeds_bytes()):
            self._kept_bytes -= len(kept.popleft())

    def _exceeds_bytes(self) -> bool:
        if self._kept_bytes > MAX_KEPT_BYTES:
            return True
        if self._kept_bytes * len(self._clients) <= MAX_ALL_KEPT_BYTES:
            return False
        return sum(client.frames._kept_bytes for client in self._clients.values()) > MAX_ALL_KEPT_BYTES

    def kept(self) -> list[str | bytes]:
        """Return the frames that are kept, in order."""
        return list(self._kept)

    def discard(self, read: int) -> None:
        """Discard the first `read` frames."""
        kept = self._kept
        if read == self.count:  # all of them, as usual
            kept.clear()
            self._kept_bytes = 0
        while kept and self.count - len(kept) < read:
            self._kept_bytes -= len(kept.popleft())

    def has_all_after(self, read: int) -> bool:
        """Whether all frames after the first `read` are kept."""
        return self.count - len(self._kept) <= read <= self.count
