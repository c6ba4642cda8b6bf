"""One environment server that is started, watched, and started again when it dies."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from enum import StrEnum
from typing import NoReturn, Protocol, TypeVar
from urllib.parse import urlsplit

from openenv_core.errors import ProviderError
from openenv_core.play.reporters import harmless
from openenv_core.providers.base import status_of
from openenv_core.providers.process import last_traceback
from rl_bridge.errors import RoleError
from rl_bridge.services.options import RestartBudget, RestartPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")

HTTP_PORT = 80

POLL_INTERVAL_S = 0.2
"""Between two looks at a server, so the longest that its death stays unnoticed."""
PROBE_INTERVAL_S = 5.0
"""Between two questions after a server's health, and how long an answer may take."""
SILENCE_LIMIT_S = 60.0
"""How long a server may answer none of them until it counts as dead. One whose environments compute on its event
loop answers late: longer than a step may take."""
STOP_RETRY_INTERVAL_S = 0.5
"""Between two attempts to end a server whose start is still under way."""


class Watchable(Protocol):
    """A provider whose server can be looked at. All of it may block."""

    @property
    def alive(self) -> bool:
        """Whether the server runs."""

    def output(self) -> str:
        """Return the last of what it printed."""

    def start(self) -> str:
        """Start it, wait until it is healthy, and return its URL."""

    def stop(self) -> None:
        """Stop it; a start that is under way in another thread fails then."""


class ServerState(StrEnum):
    """How a server stands."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    FAILED = "failed"
    """Its restart budget is gone."""
    STOPPED = "stopped"


class SupervisedServer:
    """Keeps one server alive.

    Args:
        source: What it is called in messages.
        provider: Starts and stops it, any number of times.
        threads: Where the provider's calls are made.
        restarts: How often, and how soon.
        changed: Called on the event loop whenever `url` is another.
    """

    def __init__(
        self,
        source: str,
        provider: Watchable,
        threads: Executor,
        restarts: RestartPolicy,
        changed: Callable[[], None],
    ) -> None:
        self._source = source
        self._provider = provider
        self._threads = threads
        self._policy = restarts
        self._budget = RestartBudget(restarts)
        self._changed = changed
        self._starting: asyncio.Future[str] | None = None
        self.restarts = 0
        """How often it has been started again."""
        self.state = ServerState.STOPPED
        """What it is doing."""
        self.url: str | None = None
        """Where it serves; None while it does not."""

    @property
    def pid(self) -> int | None:
        """The process that watches over it, where it is one of this machine's."""
        return getattr(self._provider, "pid", None)

    async def start(self) -> None:
        """Start it.

        Raises:
            openenv_core.ProviderError: It could not be started.
        """
        self.state = ServerState.STARTING
        await self._start()

    async def traceback(self) -> str:
        """The last traceback that it printed; empty where there is none."""
        return harmless(await self._call(lambda: last_traceback(self._provider.output())))

    async def supervise(self) -> NoReturn:
        """Start it again whenever it dies, or answers nobody.

        Raises:
            RoleError: The restart budget is gone.
        """
        while True:
            reason = await self._until_lost()
            self._set(None, ServerState.RESTARTING)
            await self._restart(f"{reason}\n{await self._call(self._last_words)}")

    async def stop(self) -> None:
        """Stop it, also while it starts. Raises what the provider does."""
        self._set(None, ServerState.STOPPED)
        while self._starting is not None and not self._starting.done():
            # A start may not have come to where a stop has an effect.
            await self._call(self._provider.stop)
            await asyncio.wait({self._starting}, timeout=STOP_RETRY_INTERVAL_S)
        if self._starting is not None:
            await asyncio.gather(
                self._starting, return_exceptions=True
            )  # whoever started it was told, or is gone
        await self._call(self._provider.stop)

    async def _until_lost(self) -> str:
        """Return what became of the server, when something has."""
        watchers = [asyncio.create_task(self._until_ended()), asyncio.create_task(self._until_silent())]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _until_ended(self) -> str:
        while await self._call(self._look):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(POLL_INTERVAL_S)
        return "it ended"

    async def _until_silent(self) -> str:
        clock = asyncio.get_running_loop().time
        heard = clock()
        while True:
            asked = clock()
            if await self._call(self._answers):
                heard = clock()
            elif asked - heard >= SILENCE_LIMIT_S:
                # Not before it was asked that late: what stood still until then may be this machine.
                return f"it has not answered for {SILENCE_LIMIT_S:g} s"
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _restart(self, reason: str) -> None:
        while True:
            pause = self._budget.spend(asyncio.get_running_loop().time())
            if pause is None:
                self._set(None, ServerState.FAILED)
                raise RoleError(
                    f"expected the environment's server {self._source} to need at most {self._policy.budget} restarts "
                    f"in {self._policy.window_s:g} s, it was lost once more; see why, or raise the budget: {reason}"
                )
            logger.warning("the environment's server %s is started again: %s", self._source, reason)
            await asyncio.sleep(pause)
            self.restarts += 1
            try:
                await self._call(self._provider.stop)  # what is left of it
                await self._start()
            except ProviderError as error:
                reason = str(error)
            else:
                return

    async def _start(self) -> None:
        self._starting = asyncio.ensure_future(self._call(self._provider.start))
        self._set(await asyncio.shield(self._starting), ServerState.SERVING)

    def _set(self, url: str | None, state: ServerState) -> None:
        changed = url != self.url
        self.url, self.state = url, state
        if changed:
            self._changed()

    def _look(self) -> bool:
        return self._provider.alive

    def _answers(self) -> bool:
        try:
            status_of(urlsplit(self.url).port or HTTP_PORT, PROBE_INTERVAL_S)
        except ValueError:
            return True  # it asks for a token, or says that it is not well; it says something
        except OSError:
            return False
        return True

    def _last_words(self) -> str:
        return self._provider.output().rstrip()[-2000:] or "it printed nothing"

    def _call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._threads, function)
