"""Synchronisation of new weights from the trainer to the generators, concurrent with the loop."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_bridge.errors import RoleError

if TYPE_CHECKING:
    from rl_bridge.generator.base import UpdateMetrics


def sync_metrics(push_s: float, updates: "Iterable[UpdateMetrics]") -> dict[str, float]:
    """Return the seconds that one synchronisation took, by their names in the log; for the slowest generator."""
    loads = list(updates)
    slowest = {
        name: max(getattr(load, name) for load in loads) for name in ("transport_s", "pause_s", "load_s")
    }
    return {f"sync/{name}": seconds for name, seconds in ({"push_s": push_s} | slowest).items()}


class WeightSync:
    """Runs one synchronisation at a time, each with a deadline; if `overlapped`, `begin` returns before it is done.

    `on_error` is called with an error, so that waiters for rollouts do not wait for ever.
    """

    def __init__(
        self, *, on_error: Callable[[BaseException], None], overlapped: bool, timeout_s: float
    ) -> None:
        self._on_error = on_error
        self._overlapped = overlapped
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.Timeout | None = None
        self.latest_metrics: Mapping[str, float] = {}
        """Metrics of the last completed synchronisation; overlapped, that of the version before the loop's."""

    async def begin(self, work: Coroutine[Any, Any, Mapping[str, float]]) -> None:
        """Start a synchronisation once the previous one is done; raise the error of that.

        If `overlapped`, `work` has run up to its first wait when this returns, and the next call raises its error;
        otherwise it is done, or its error is raised.
        """
        try:
            await self.finish()
        except BaseException:
            work.close()
            raise
        self._task = asyncio.create_task(self._run(work))
        if self._overlapped:
            await asyncio.sleep(0)
        else:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the synchronisation in progress."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Cancel the synchronisation in progress."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextmanager
    def without_deadline(self) -> Iterator[None]:
        """Within the block the deadline of the synchronisation in progress, if there is one, is not counted down."""
        if (deadline := self._deadline) is None or (ends_at := deadline.when()) is None:
            yield
            return
        time = asyncio.get_running_loop().time
        left_s = ends_at - time()
        deadline.reschedule(None)
        try:
            yield
        finally:
            deadline.reschedule(time() + left_s)

    async def _run(self, work: Coroutine[Any, Any, Mapping[str, float]]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                self._deadline = timeout
                try:
                    self.latest_metrics = await work
                finally:
                    self._deadline = None
        except TimeoutError as error:
            if not timeout.expired():
                raise
            timeout_error = RoleError(
                f"expected new weights to be served within {self._timeout_s:g} s, they are not; "
                "raise trainer.timeout_s, or see the generators' logs"
            )
            self._on_error(timeout_error)
            raise timeout_error from error
        except Exception as error:
            self._on_error(error)
            raise
