"""The environment servers of a run: found or started, kept alive, and their addresses and token told."""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeAlias

from openenv_core import LocalProcessProvider
from openenv_core.providers import DockerPool
from rl_bridge.environments.supervised import SupervisedServer, Watchable
from rl_bridge.errors import ConfigError
from rl_bridge.services.options import RestartPolicy

logger = logging.getLogger(__name__)

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
        app: An ASGI application to serve from local processes, as `package.module:name`.
        image: A Docker image to serve from containers; they come from a pool that keeps a spare one warm.
        urls: Servers that already run.
        count: How many servers to start.
        container: Fields of `openenv_core.providers.ContainerOptions` for `image`.
        restarts: How often one server may be started again, and how soon.
        on_change: Told the URLs whenever they change.
        logs: A folder where each server of `app` has a file with what it prints, `environment-0.log` and so on.
        name: What such files are called.

    Raises:
        ValueError: Not exactly one of `app`, `image` and `urls` is given.
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
        if [app is not None, image is not None, bool(urls)].count(True) != 1:
            raise ValueError(
                f"expected exactly one of app, image and urls, got app={app!r}, image={image!r}, urls={list(urls)!r}"
            )
        if count < 1:
            raise ValueError(f"expected a count of at least 1, got {count}")
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
        # Starting, watching and stopping block; a stop has to get a thread while a start and a probe have theirs.
        self._threads = ThreadPoolExecutor(max(3 * len(providers), 1), "ropewalk-servers")
        self._servers = [
            SupervisedServer(
                str(app or image), provider, self._threads, restarts or RestartPolicy(), self._changed
            )
            for provider in providers
        ]
        self._on_change = on_change
        self._news = asyncio.Event()
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
        """Start the servers.

        Raises:
            openenv_core.ProviderError: One could not be started; none is left running.
        """
        try:
            await asyncio.gather(*(server.start() for server in self._servers))
        except BaseException:
            await self._stop()
            raise
        self._tasks = [asyncio.create_task(server.supervise()) for server in self._servers]
        if self._on_change is not None:
            self._changed()  # the first list is news too
            self._tasks.append(asyncio.create_task(self._tell(self._on_change)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def traceback(self) -> str:
        """The last traceback that a server printed which was started here; empty where there is none."""
        told = await asyncio.gather(*(server.traceback() for server in self._servers))
        return next(filter(None, told), "")

    async def watch(self) -> None:
        """Wait for the worst; it never returns while the servers can be had.

        Raises:
            RoleError: A server died and its restart budget is gone.
            Exception: What `on_change` raised.
        """
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

    def _changed(self) -> None:
        self._news.set()

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


def read_token(file: str | None) -> str | None:
    """The token in `env.token_file`: its first line that is no comment, as `ropewalk serve --token-file` reads them.

    Raises:
        ConfigError: The file cannot be read, or has none.
    """
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
    """Where code can be run now, for reward functions and tasks: addresses of `monarch.roles.coder`'s servers.

    Raises:
        ConfigError: The run has no such role.
    """
    file = os.environ.get(ENVIRONMENT_VARIABLE)
    if file is None:
        raise ConfigError(
            f"expected {ENVIRONMENT_VARIABLE} to name the file of addresses, it is not set; give the run "
            "monarch.roles.coder={replicas: 1}"
        )
    return tuple(json.loads(Path(file).read_text(encoding="utf-8")))
