"""New weights on their way from the trainer to the generators, beside the loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rl_bridge.errors import RoleFailed


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

    async def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to bring a version, after the one before it is there.

        Args:
            work: Brings it. What it asks for first has been asked for when this returns.

        Raises:
            BridgeError: It failed, or the one before it did.
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
        """Wait until what was begun is there.

        Raises:
            BridgeError: It failed.
        """
        if self._task is not None:
            await asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Give up what is under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _bring(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                await work
        except TimeoutError as error:
            if not timeout.expired():
                raise
            late = RoleFailed(
                f"expected new weights to be served within {self._timeout_s:g} s, they are not; "
                "raise trainer.timeout_s, or see the generators' logs"
            )
            self._failed(late)
            raise late from error
        except Exception as error:
            self._failed(error)
            raise
