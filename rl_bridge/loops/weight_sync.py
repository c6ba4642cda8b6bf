"""New weights on their way from the trainer to the generators, beside the loop."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from rl_bridge.errors import RoleError

if TYPE_CHECKING:
    from rl_bridge.generator.replica import UpdateMetrics


@dataclass(kw_only=True, slots=True, frozen=True)
class SyncMetrics:
    """What bringing one version cost, in seconds; of several generators that of the slowest.

    Attributes:
        push_s: Until the trainer's weights were in the store.
        transport_s: Until the tensors were with the generator.
        pause_s: In which the generator began no new prompt.
        load_s: Of these, in which it generated nothing at all.
    """

    push_s: float
    transport_s: float
    pause_s: float
    load_s: float

    @classmethod
    def of(cls, push_s: float, taken: "Iterable[UpdateMetrics]") -> Self:
        """Put together what the trainer and the generators told."""
        told = list(taken)
        return cls(
            push_s=push_s,
            transport_s=max(one.transport_s for one in told),
            pause_s=max(one.pause_s for one in told),
            load_s=max(one.load_s for one in told),
        )

    def named(self) -> dict[str, float]:
        """By the names that the log uses."""
        return {f"sync/{name}": value for name, value in asdict(self).items()}


class WeightSync:
    """Brings one version after the other, each within a deadline.

    Args:
        failed: Told what went wrong; whoever waits for rollouts would wait for ever otherwise.
        overlapped: Whether `begin` returns before the weights are there.
        timeout_s: How long one version may take.
    """

    def __init__(
        self, *, failed: Callable[[BaseException], None], overlapped: bool, timeout_s: float
    ) -> None:
        self._failed = failed
        self._overlapped = overlapped
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None
        self.newest: SyncMetrics | None = None
        """Of the last version that was brought: where it goes on beside the loop, of the one before the loop's."""

    async def begin(self, work: Coroutine[Any, Any, SyncMetrics]) -> None:
        """Begin to bring a version, after the one before it is there.

        What `work` asks for first has been asked for when this returns. Raises what either of the two failed with.
        """
        try:
            await self.finish()
        except BaseException:
            work.close()
            raise
        self._task = asyncio.create_task(self._bring(work))
        if self._overlapped:
            await asyncio.sleep(0)
        else:
            await self.finish()

    async def finish(self) -> None:
        """Wait until what was begun is there."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Give up what is under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _bring(self, work: Coroutine[Any, Any, SyncMetrics]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                self.newest = await work
        except TimeoutError as error:
            if not timeout.expired():
                raise
            late = RoleError(
                f"expected new weights to be served within {self._timeout_s:g} s, they are not; "
                "raise trainer.timeout_s, or see the generators' logs"
            )
            self._failed(late)
            raise late from error
        except Exception as error:
            self._failed(error)
            raise
