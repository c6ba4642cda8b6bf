"""Who reads the weights while the next step is being computed."""

import threading
import time
from types import TracebackType

from rl_bridge.errors import TrainingError


class Readers:
    """Counts readers; what would change the weights waits until there is none.

    Reading may begin and end in different threads.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_until_none(self, timeout_s: float) -> float:
        """Wait for the last reader.

        Returns:
            How long it took, in seconds; exactly 0 where there was none.

        Raises:
            TrainingError: It did not end in time.
        """
        with self._changed:
            if not self._count:
                return 0.0
            started = time.perf_counter()
            if not self._changed.wait_for(lambda: self._count == 0, timeout=timeout_s):
                raise TrainingError(
                    f"expected the weights to be pushed within {timeout_s:g} s, they are still being read; "
                    "see what holds the store, or raise the time-out of collectives"
                )
            return time.perf_counter() - started
