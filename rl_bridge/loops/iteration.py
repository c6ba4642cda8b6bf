"""How long the parts of one iteration took, by the names that the log uses."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl_bridge.metrics import span


class Iteration:
    """Times the parts of one passage through a loop; each is a span of the process too."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, *, waits_for: str | None = None) -> Iterator[None]:
        """Time a block.

        Args:
            name: What happens there.
            waits_for: Whom the loop waits for there; None where it works itself.
        """
        began = time.perf_counter()
        try:
            with span(name, waits_for):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def figures(self) -> dict[str, float]:
        """Seconds of wall time, as `time/<part>_s`."""
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
