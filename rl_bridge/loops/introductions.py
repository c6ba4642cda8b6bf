"""Keeps rollout workers told whom they work with: the generators that serve, and the environment's servers."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from rl_bridge.background import tell_of_errors
from rl_bridge.errors import NoReplicaError, ReplicaLostError
from rl_bridge.services import Service

logger = logging.getLogger(__name__)

INTRODUCTION_TIMEOUT_S = 60.0


class Introductions:
    """Hands the newest of each kind of news to all workers; what was overtaken is not told any more.

    A worker that is started later is told by its service: the endpoints are replayed.

    Args:
        failed: Told what went wrong, if anything does.
        patience_s: How long one piece of news may take, before the next is told.
    """

    def __init__(
        self, *, failed: Callable[[BaseException], None], patience_s: float = INTRODUCTION_TIMEOUT_S
    ) -> None:
        self._patience_s = patience_s
        self._failed = failed
        self._news: dict[str, Any] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def tell(self, endpoint: str, news: Any) -> None:
        """Have workers told, soon; `endpoint` is the one of theirs that takes it."""
        self._news[endpoint] = news
        self._wake.set()

    async def begin(self, rollout: Service) -> None:
        """Tell everything now, then go on telling in the background.

        Args:
            rollout: The service of the workers.

        Raises:
            BridgeError: The workers cannot be told.
        """
        await self._tell_all(rollout)
        self._task = asyncio.create_task(self._go_on(rollout))
        tell_of_errors(self._task, self._failed)

    async def close(self) -> None:
        """Tell nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _go_on(self, rollout: Service) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._tell_all(rollout)
            except (NoReplicaError, ReplicaLostError):
                continue  # workers that are started again are told before they serve

    async def _tell_all(self, rollout: Service) -> None:
        while self._news:
            endpoint, news = self._news.popitem()
            try:
                async with asyncio.timeout(self._patience_s):
                    await getattr(rollout, endpoint).fanout(news)
            except TimeoutError:
                # The others know; that one has it before it serves again, or is taken for lost when it is given work.
                logger.warning("a rollout worker does not take what it is told (%s)", endpoint)
