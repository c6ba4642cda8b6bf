"""The environment servers of a run: started or given by URL, supervised, and announced to their users."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from openenv_core import LocalProcessProvider
from openenv_core.cli.command import sanitize
from openenv_core.errors import ProviderError
from openenv_core.providers import DockerPool, ServerFleet
from openenv_core.providers.base import Provider, WatchedProvider, status_of
from openenv_core.providers.process import last_traceback
from rl_bridge.errors import ConfigError, RoleError
from rl_bridge.services.restarts import ReplicaState, RestartBudget, RestartPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")

HTTP_PORT = 80

POLL_INTERVAL_S = 0.2
"""Interval of checks whether a server's process is alive: the longest that its death goes unnoticed."""
PROBE_INTERVAL_S = 5.0
"""Pause between two health probes of a server, and the timeout of each."""
SILENCE_LIMIT_S = 60.0
"""How long a server may answer no probe before it counts as dead. It is longer than a step may take: a server whose
environments compute on its event loop answers only afterwards."""
FLEET_POLL_INTERVAL_S = 1.0
"""How often a fleet is asked for its servers."""
STOP_RETRY_INTERVAL_S = 0.5
"""Pause between two attempts to stop a server that is still starting."""


class Watchable(Provider, WatchedProvider, Protocol):
    """A provider whose server can be watched; stopping it makes a start in progress fail."""


class SupervisedServer:
    """Keeps one server alive; messages call it `source`.

    The provider's methods are called in `threads`; `changed` is called on the event loop whenever `url` changes.
    """

    def __init__(
        self,
        source: str,
        provider: Watchable,
        threads: Executor,
        restarts: RestartPolicy,
        on_url_change: Callable[[], None],
    ) -> None:
        self._source = source
        self._provider = provider
        self._threads = threads
        self._policy = restarts
        self._budget = RestartBudget(restarts)
        self._on_url_change = on_url_change
        self._starting: asyncio.Future[str] | None = None
        self.restarts = 0
        """The number of restarts."""
        self.state = ReplicaState.STOPPED
        """The server's state."""
        self.url: str | None = None
        """The URL at which it serves; None while it does not."""

    @property
    def pid(self) -> int | None:
        """The id of the process that guards it; None if it does not run in a local process."""
        return getattr(self._provider, "pid", None)

    async def start(self) -> None:
        """Start the server."""
        self.state = ReplicaState.STARTING
        await self._start()

    async def traceback(self) -> str:
        """Return the last traceback that it printed; empty if there is none."""
        return sanitize(await self._call(lambda: last_traceback(self._provider.output())))

    async def supervise(self) -> NoReturn:
        """Restart it whenever it dies or stops answering."""
        while True:
            reason = await self._wait_until_lost()
            self._set_state(None, ReplicaState.RESTARTING)
            await self._restart(f"{reason}\n{await self._call(self._output_tail)}")

    async def stop(self) -> None:
        """Stop it, also while it is starting. Raises what the provider raises."""
        self._set_state(None, ReplicaState.STOPPED)
        while self._starting is not None and not self._starting.done():
            # Repeated, because a start may not have reached the point from which a stop takes effect.
            await self._call(self._provider.stop)
            await asyncio.wait({self._starting}, timeout=STOP_RETRY_INTERVAL_S)
        if self._starting is not None:
            await asyncio.gather(
                self._starting, return_exceptions=True
            )  # the caller of `start` gets the exception
        await self._call(self._provider.stop)

    async def _wait_until_lost(self) -> str:
        """Wait until the server is lost; returns how."""
        watchers = [
            asyncio.create_task(self._wait_until_ended()),
            asyncio.create_task(self._wait_until_silent()),
        ]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _wait_until_ended(self) -> str:
        while await self._call(lambda: self._provider.alive):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(POLL_INTERVAL_S)
        return "it ended"

    async def _wait_until_silent(self) -> str:
        clock = asyncio.get_running_loop().time
        last_reply = clock()
        while True:
            sent_at = clock()
            if await self._call(self._is_answering):
                last_reply = clock()
            elif sent_at - last_reply >= SILENCE_LIMIT_S:
                # The probe itself must have been sent that late: before, this machine may have been suspended.
                return f"it has not answered for {SILENCE_LIMIT_S:g} s"
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _restart(self, reason: str) -> None:
        while True:
            backoff_s = self._budget.take_restart(asyncio.get_running_loop().time())
            if backoff_s is None:
                self._set_state(None, ReplicaState.FAILED)
                raise RoleError(
                    f"expected the environment's server {self._source} to need at most {self._policy.budget} restarts "
                    f"in {self._policy.window_s:g} s, it was lost once more; see why, or raise the budget: {reason}"
                )
            logger.warning("restarting the environment's server %s: %s", self._source, reason)
            await asyncio.sleep(backoff_s)
            self.restarts += 1
            try:
                await self._call(self._provider.stop)  # its remaining processes
                await self._start()
            except ProviderError as error:
                reason = str(error)
            else:
                return

    async def _start(self) -> None:
        self._starting = asyncio.ensure_future(self._call(self._provider.start))
        self._set_state(await asyncio.shield(self._starting), ReplicaState.SERVING)

    def _set_state(self, url: str | None, state: ReplicaState) -> None:
        url_changed = url != self.url
        self.url, self.state = url, state
        if url_changed:
            self._on_url_change()

    def _is_answering(self) -> bool:
        try:
            status_of(urlsplit(self.url).port or HTTP_PORT, PROBE_INTERVAL_S)
        except ValueError:
            return True  # it requires a token or reports that it is unhealthy, but it does answer
        except OSError:
            return False
        return True

    def _output_tail(self) -> str:
        return self._provider.output().rstrip()[-2000:] or "it printed nothing"

    def _call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._threads, function)


OnChange: TypeAlias = Callable[[tuple[str, ...]], Awaitable[None]]
"""Called with the URLs of the serving servers whenever they change; calls do not overlap."""

SPARE_CONTAINERS = 1
"""Containers kept warm beside those in use, so that a lost one is replaced in milliseconds."""


class EnvironmentServers:
    """One or several environment servers behind a list of URLs.

    Servers of `app` and `image` are started here, and restarted within the restart policy when they die. Those of a
    fleet are restarted by its engine. A server given by URL is not managed: its URL stays on the list, and clients that
    cannot reach it retry.

        async with EnvironmentServers(app="envs.blackjack_env.server.app:app", count=2) as servers:
            leases.replace(servers.urls)

    Args:
        app: An ASGI application to serve from local processes, as `package.module:name`; alternatively `image` or
            `urls` or `fleet`.
        image: A Docker image to serve from containers; they come from a pool that keeps a spare one warm.
        urls: Servers that already run.
        fleet: A fleet that is not started yet.
        count: The number of servers of `app` or `image` to start.
        container: Fields of `openenv_core.providers.ContainerOptions` for `image`.
        restarts: How often and how soon each server may be restarted.
        on_change: Called with the URLs whenever they change.
        logs: A folder for a log of each server of `app`: `environment-0.log` and so on.
        name: The stem of the log files' names.
    """

    def __init__(
        self,
        *,
        app: str | None = None,
        image: str | None = None,
        urls: Sequence[str] = (),
        fleet: ServerFleet | None = None,
        count: int = 1,
        container: Mapping[str, Any] | None = None,
        restarts: RestartPolicy | None = None,
        on_change: OnChange | None = None,
        logs: Path | None = None,
        name: str = "environment",
    ) -> None:
        self._external_urls = tuple(urls)
        self._fleet = fleet
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
        self._urls_changed = asyncio.Event()
        # Start, probe and stop block: three threads per server, so that a stop never waits for the other two.
        self._threads = ThreadPoolExecutor(max(3 * len(providers), 1), "ropewalk-servers")
        self._servers = [
            SupervisedServer(
                str(app or image),
                provider,
                self._threads,
                restarts or RestartPolicy(),
                self._urls_changed.set,
            )
            for provider in providers
        ]
        self._on_change = on_change
        self._tasks: list[asyncio.Task[NoReturn]] = []

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the servers that serve now, as far as is known."""
        return self._external_urls or tuple(server.url for server in self._servers if server.url is not None)

    @property
    def started(self) -> list[SupervisedServer]:
        """The servers that were started here."""
        return list(self._servers)

    async def __aenter__(self) -> Self:
        """Start the servers; ProviderError if one could not be started, and then none is left running."""
        try:
            await asyncio.gather(*(server.start() for server in self._servers))
            if self._fleet is not None:
                await self._call(self._fleet.start)
                self._external_urls = tuple(await self._call(self._fleet.urls))
        except BaseException:
            await self._stop()
            raise
        self._tasks = [asyncio.create_task(server.supervise()) for server in self._servers]
        if self._fleet is not None:
            self._tasks.append(asyncio.create_task(self._follow(self._fleet)))
        if self._on_change is not None:
            self._urls_changed.set()  # the first list is announced too
            self._tasks.append(asyncio.create_task(self._announce_urls(self._on_change)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def traceback(self) -> str:
        """Return the last traceback that a server started here has printed; empty if there is none."""
        tracebacks = await asyncio.gather(*(server.traceback() for server in self._servers))
        return next(filter(None, tracebacks), "")

    async def watch(self) -> None:
        """Wait for ever; RoleError if a server dies and its restart budget is exhausted."""
        if not self._tasks:
            await asyncio.get_running_loop().create_future()
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    async def _follow(self, fleet: ServerFleet) -> NoReturn:
        """Look at which servers a fleet has, again and again. One that is silent is left on the list."""
        while True:
            await asyncio.sleep(FLEET_POLL_INTERVAL_S)
            try:
                urls = tuple(await self._call(fleet.urls))
            except ProviderError as error:
                logger.warning("the fleet %s does not answer: %s", fleet.name, error)
                continue
            if urls and set(urls) != set(self._external_urls):
                self._external_urls = urls
                self._urls_changed.set()

    def _call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def _announce_urls(self, on_change: OnChange) -> NoReturn:
        while True:
            await self._urls_changed.wait()
            self._urls_changed.clear()
            await on_change(self.urls)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stops: list[Awaitable[None]] = [server.stop() for server in self._servers]
        if self._fleet is not None:
            stops.append(self._call(self._fleet.stop))
        for failure in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(failure, BaseException):
                logger.warning("a server could not be stopped: %s", failure)
        if self._pool is not None:
            await self._call(self._pool.close)
        self._threads.shutdown(wait=False)


@asynccontextmanager
async def run_servers(server_groups: Iterable[EnvironmentServers]) -> AsyncIterator[None]:
    """Start all of these concurrently, and stop them likewise; ProviderError if one cannot be started."""
    running: list[EnvironmentServers] = []

    async def open_one(servers: EnvironmentServers) -> None:
        await servers.__aenter__()
        running.append(servers)

    try:
        try:
            async with asyncio.TaskGroup() as group:
                for servers in server_groups:
                    group.create_task(open_one(servers))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        yield
    finally:
        await asyncio.gather(*(servers.__aexit__(None, None, None) for servers in running))


def read_token(file: str | None) -> str | None:
    """Read the token of `env.token_file`: the first line that is no comment, as for `ropewalk serve --token-file`."""
    if file is None:
        return None
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"env.token_file: cannot read {file!r}: {reason}") from error
    for line in lines:
        if (token := line.strip()) and not token.startswith("#"):
            return token
    raise ConfigError(f"env.token_file: expected a token in {file!r}, got none")


CODER_URLS_VARIABLE: Final = "ROPEWALK_CODERS"
"""Names the file with the coder servers' URLs, in the processes of reward functions and rollout workers."""


def coder_urls_file(folder: Path) -> Path:
    """Return the path of a run's file of coder URLs."""
    return folder.absolute() / "coders.json"


def write_coder_urls(file: Path, urls: Sequence[str]) -> None:
    """Write the URLs of the servers that serve now, atomically: a reader sees the old list or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(list(urls)) + "\n", encoding="utf-8")
    partial.replace(file)


def coder_urls() -> tuple[str, ...]:
    """Return the URLs of `monarch.roles.coder`'s servers, on which reward functions and tasks can run code now."""
    file = os.environ.get(CODER_URLS_VARIABLE)
    if file is None:
        raise ConfigError(
            f"expected {CODER_URLS_VARIABLE} to name the file of addresses, it is not set; give the run "
            "monarch.roles.coder={replicas: 1}"
        )
    return tuple(json.loads(Path(file).read_text(encoding="utf-8")))
