"""Keeps rollout workers told whom they work with: the generators that serve, and the environment's servers."""

import asyncio
from collections.abc import Callable
from typing import Any

from rl_bridge.errors import NoReplica, ReplicaLost
from rl_bridge.services import Service


class Introductions:
    """Hands the newest of each kind of news to all workers; what was overtaken is not told any more.

    A worker that is started later is told by its service: the endpoints are replayed.

    Args:
        failed: Told what went wrong, if anything does.
    """

    def __init__(self, *, failed: Callable[[BaseException], None]) -> None:
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
        self._task.add_done_callback(self._ended)

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
            except (NoReplica, ReplicaLost):
                continue  # workers that are started again are told before they serve

    async def _tell_all(self, rollout: Service) -> None:
        while self._news:
            endpoint, news = self._news.popitem()
            await getattr(rollout, endpoint).fanout(news)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
