"""The environment servers of a run: found or started, supervised, and announced with address and token."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from openenv_core import LocalProcessProvider
from openenv_core.errors import ProviderError
from openenv_core.play.reporters import sanitize
from openenv_core.providers import DockerPool
from openenv_core.providers.base import Provider, WatchedProvider, status_of
from openenv_core.providers.process import last_traceback
from rl_bridge.errors import ConfigError, RoleError
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


class Watchable(Provider, WatchedProvider, Protocol):
    """A provider whose server can be looked at; a start that is under way fails where it is stopped."""


class ServerState(StrEnum):
    """The state of a server."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    FAILED = "failed"
    """Its restart budget is gone."""
    STOPPED = "stopped"


class SupervisedServer:
    """Keeps one server alive, which is called `source` in messages.

    The provider's calls are made in `threads`; `changed` is called on the event loop whenever `url` is another.
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
        """Start it."""
        self.state = ServerState.STARTING
        await self._start()

    async def traceback(self) -> str:
        """The last traceback that it printed; empty where there is none."""
        return sanitize(await self._call(lambda: last_traceback(self._provider.output())))

    async def supervise(self) -> NoReturn:
        """Restart it whenever it dies or stops answering."""
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
        while await self._call(lambda: self._provider.alive):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(POLL_INTERVAL_S)
        return "it ended"

    async def _until_silent(self) -> str:
        clock = asyncio.get_running_loop().time
        last_reply = clock()
        while True:
            sent = clock()
            if await self._call(self._answers):
                last_reply = clock()
            elif sent - last_reply >= SILENCE_LIMIT_S:
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


OnChange: TypeAlias = Callable[[tuple[str, ...]], Awaitable[None]]
"""Told the servers that serve, whenever that changes. The next change is told when it has returned."""

SPARE_CONTAINERS = 1
"""Kept warm beside those in use, so that a lost container is replaced in milliseconds."""


class EnvironmentServers:
    """One or several environment servers behind a list of URLs.

    Servers of `app` and `image` are started here, and started again when they die, within the restart policy. A URL
    is somebody else's: it stays on the list, and whoever cannot reach it tries again.

        async with EnvironmentServers(app="envs.blackjack_env.server.app:app", count=2) as servers:
            leases.replace(servers.urls)

    Args:
        app: An ASGI application to serve from local processes, as `package.module:name`; or one of the next two.
        image: A Docker image to serve from containers; they come from a pool that keeps a spare one warm.
        urls: Servers that already run.
        count: How many servers to start.
        container: Fields of `openenv_core.providers.ContainerOptions` for `image`.
        restarts: How often one server may be started again, and how soon.
        on_change: Told the URLs whenever they change.
        logs: A folder where each server of `app` has a file with what it prints, `environment-0.log` and so on.
        name: What such files are called.
    """

    def __init__(
        self,
        *,
        app: str | None = None,
        image: str | None = None,
        urls: Sequence[str] = (),
        count: int = 1,
        container: Mapping[str, Any] | None = None,
        restarts: RestartPolicy | None = None,
        on_change: OnChange | None = None,
        logs: Path | None = None,
        name: str = "environment",
    ) -> None:
        self._given = tuple(urls)
        self._pool: DockerPool | None = None
        providers: list[Watchable] = []
        if app is not None:
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
            files = [None if logs is None else logs / f"{name}-{number}.log" for number in range(count)]
            providers = [LocalProcessProvider(app, log=file) for file in files]
        elif image is not None:
            self._pool = DockerPool(image, count + SPARE_CONTAINERS, **(container or {}))
            providers = [self._pool.provider() for _ in range(count)]
        self._news = asyncio.Event()
        # Starting, watching and stopping block; a stop has to get a thread while a start and a probe have theirs.
        self._threads = ThreadPoolExecutor(max(3 * len(providers), 1), "ropewalk-servers")
        self._servers = [
            SupervisedServer(
                str(app or image), provider, self._threads, restarts or RestartPolicy(), self._news.set
            )
            for provider in providers
        ]
        self._on_change = on_change
        self._tasks: list[asyncio.Task[NoReturn]] = []

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that serve now, as far as is known."""
        return self._given or tuple(server.url for server in self._servers if server.url is not None)

    @property
    def started(self) -> list[SupervisedServer]:
        """The servers that were started here."""
        return list(self._servers)

    async def __aenter__(self) -> Self:
        """Start the servers; ProviderError where one could not be started, and none is left running."""
        try:
            await asyncio.gather(*(server.start() for server in self._servers))
        except BaseException:
            await self._stop()
            raise
        self._tasks = [asyncio.create_task(server.supervise()) for server in self._servers]
        if self._on_change is not None:
            self._news.set()  # the first list is news too
            self._tasks.append(asyncio.create_task(self._tell(self._on_change)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def traceback(self) -> str:
        """The last traceback that a server printed which was started here; empty where there is none."""
        tracebacks = await asyncio.gather(*(server.traceback() for server in self._servers))
        return next(filter(None, tracebacks), "")

    async def watch(self) -> None:
        """Never return while the servers can be had; RoleError where one died and its restart budget is gone."""
        if not self._tasks:
            await asyncio.get_running_loop().create_future()
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    async def _tell(self, on_change: OnChange) -> NoReturn:
        while True:
            await self._news.wait()
            self._news.clear()
            await on_change(self.urls)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stopped = await asyncio.gather(*(server.stop() for server in self._servers), return_exceptions=True)
        for failure in stopped:
            if isinstance(failure, BaseException):
                logger.warning("a server could not be stopped: %s", failure)
        if self._pool is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.close)
        self._threads.shutdown(wait=False)


@asynccontextmanager
async def serving(several: Iterable[EnvironmentServers]) -> AsyncIterator[None]:
    """Start all of these side by side, and stop them so; ProviderError where one cannot be started."""
    opened: list[EnvironmentServers] = []

    async def open_one(one: EnvironmentServers) -> None:
        await one.__aenter__()
        opened.append(one)

    try:
        try:
            async with asyncio.TaskGroup() as group:
                for one in several:
                    group.create_task(open_one(one))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        yield
    finally:
        await asyncio.gather(*(one.__aexit__(None, None, None) for one in opened))


def read_token(file: str | None) -> str | None:
    """The token in `env.token_file`: its first line that is no comment, as `ropewalk serve --token-file` reads them."""
    if file is None:
        return None
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"env.token_file: cannot read {file!r}: {reason}") from error
    for line in lines:
        if (token := line.strip()) and not token.startswith("#"):
            return token
    raise ConfigError(f"env.token_file: expected a token in {file!r}, got none")


ENVIRONMENT_VARIABLE: Final = "ROPEWALK_CODERS"
"""In the processes of reward functions and rollout workers: the file with the addresses."""


def coders_file(folder: Path) -> Path:
    """The file of a run."""
    return folder.absolute() / "coders.json"


def tell_coders(file: Path, urls: Sequence[str]) -> None:
    """Write the addresses of the servers that serve now; a reader sees the old ones or the new ones."""
    written = file.with_suffix(".partial")
    written.write_text(json.dumps(list(urls)) + "\n", encoding="utf-8")
    written.replace(file)


def coder_urls() -> tuple[str, ...]:
    """Where code can be run now, for reward functions and tasks: addresses of `monarch.roles.coder`'s servers."""
    file = os.environ.get(ENVIRONMENT_VARIABLE)
    if file is None:
        raise ConfigError(
            f"expected {ENVIRONMENT_VARIABLE} to name the file of addresses, it is not set; give the run "
            "monarch.roles.coder={replicas: 1}"
        )
    return tuple(json.loads(Path(file).read_text(encoding="utf-8")))
