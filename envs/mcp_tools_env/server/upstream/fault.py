"""What went wrong on a wire, told to whoever waits for an answer that will not come."""

import asyncio


class Fault:
    """The first thing that went wrong since it was last taken."""

    def __init__(self) -> None:
        self._words: str | None = None
        self.event = asyncio.Event()

    def tell(self, words: str) -> None:
        """Say what went wrong."""
        if self._words is None:
            self._words = words
            self.event.set()

    def take(self) -> str | None:
        """Return what went wrong, and forget it."""
        words, self._words = self._words, None
        self.event.clear()
        return words
