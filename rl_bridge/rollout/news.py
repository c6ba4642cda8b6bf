"""Keeps rollout workers told of who serves: the policy's replicas and the environment's servers."""

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, Self

from rl_bridge.errors import NoReplica, ReplicaLost
from rl_bridge.services.handle import Roster
from rl_bridge.services.service import Service

logger = logging.getLogger(__name__)


class WorkerNews:
    """Tells the workers whenever something has changed; while it is open, they know the newest of it.

    Args:
        rollout: The service of the `RolloutActor`.
        policy: The service that its workers ask.
        servers: The URLs of the environment's servers.
    """

    def __init__(self, rollout: Service, policy: Service, servers: Sequence[str]) -> None:
        self._rollout = rollout
        self._policy = policy
        self._urls = tuple(servers)
        self._news = asyncio.Event()
        self._task: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> Self:
        """Tell them for the first time, and go on from there."""
        self._policy.on_roster(self._roster_changed)
        await self._rollout.take_policy.fanout(self._policy.roster)
        await self._rollout.take_servers.fanout(self._urls)
        self._task = asyncio.create_task(self._tell())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def servers_changed(self, urls: Sequence[str]) -> None:
        """The environment's servers are these now."""
        self._urls = tuple(urls)
        self._news.set()

    async def watch(self) -> None:
        """Wait for the worst: it never returns while the workers can be told.

        Raises:
            Exception: Why they cannot be told any more.
        """
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task.result()

    def _roster_changed(self, roster: Roster) -> None:
        self._news.set()

    async def _tell(self) -> NoReturn:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._rollout.take_policy.fanout(self._policy.roster)
                await self._rollout.take_servers.fanout(self._urls)
            except (NoReplica, ReplicaLost) as error:
                # Whoever starts in their place is told before it serves.
                logger.info("no rollout worker is there to be told of a change: %s", error)
