"""The servers that a client may use: equal ones at several URLs, or those that a provider starts."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast
from urllib.parse import urlsplit

from openenv_core.backoff import Backoff
from openenv_core.client.settings import validate_url, validate_urls
from openenv_core.client.waiting import SlotWait
from openenv_core.errors import (
    CapacityError,
    ClientClosedError,
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    ProviderError,
)
from openenv_core.loop_thread import start_in_thread
from openenv_core.protocol.http import http_url
from openenv_core.providers.base import FleetProvider, describe_death
from openenv_core.proxies import proxy_for

if TYPE_CHECKING:
    from openenv_core.providers.base import Provider

T = TypeVar("T")

CAPACITY_TIMEOUT_S: Final = 1.0
"""How long a server may take to say how full it is."""

LOAD_AGE_S: Final = 1.0
"""For how long a server's answer is used, together with the sessions that this process has opened since."""

LIST_INTERVAL_S: Final = 5.0
"""How often a client that waits for a session asks for its fleet's servers, as long as those that it knows answer."""


@dataclass(slots=True, eq=False)
class _KnownLoad:
    """A server's sessions and waiting clients for each slot, what one more of them adds, and until when it counts."""

    value: float
    of_one: float = 0.0
    until: float = 0.0


_known_loads: dict[str, _KnownLoad] = {}
"""By URL, for all clients of this process."""


def forget_loads() -> None:
    """Have the next clients ask their servers how full these are."""
    _known_loads.clear()


class Servers:
    """The servers of a client, one of which is the current one.

    Args:
        urls: Their URLs, the current one first; none if the provider starts the server.
        provider: Starts the server or the fleet, or has started it.
        headers: Headers of every request.

    Attributes:
        urls: Their URLs, the current one first; none of a single server that the provider starts.
        url: URL of the current one; None until the provider has started it.
        provider: Starts the server or the fleet, or has started it.
        list_urls: Returns the URLs that a fleet's servers have now; may block. None if the servers are always the same.
    """

    def __init__(
        self,
        urls: Sequence[str],
        provider: "Provider | None" = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.urls = list(urls)
        self.url = self.urls[0] if self.urls else None
        self.provider = provider
        self.list_urls: Callable[[], Sequence[str]] | None = (
            provider.urls if isinstance(provider, FleetProvider) else None
        )
        self._headers = headers or {}
        self._start: asyncio.Future[str] | None = None
        self._listed_at = float("-inf")

    def use_next(self) -> None:
        """Make the next server the current one."""
        if self.urls:
            self.urls = [*self.urls[1:], self.urls[0]]
            self.url = self.urls[0]

    async def locate(self) -> str:
        """Return the URL of the current server, which the provider starts first if need be."""
        if self.url is None:
            self.url = validate_url(await self._start_provider(cast("Provider", self.provider)))
            await self._list()
        return self.url

    async def attempt(
        self, connect: Callable[[], Awaitable[T]], wait: SlotWait, retry_for_s: float = 0.0
    ) -> T:
        """Return the result of an attempt at the first server that accepts it; retry all while some are full.

        Args:
            connect: Coroutine function that tries the current server.
            wait: The caller's wait for a session.
            retry_for_s: Seconds for which all servers are retried if none answers.

        Raises:
            CapacityError: A server was full until the wait's deadline, and no other accepted.
            ConnectionFailedError: No server answered.
        """
        if len(self.urls) > 1:
            await self._prefer_emptier()
        clock = asyncio.get_running_loop().time
        retry_until, backoff = clock() + retry_for_s, Backoff()
        are_new = False
        while True:
            errors: list[CapacityError | ConnectionFailedError] = []
            for _ in self.urls or ("",):
                try:
                    return await connect()
                except (CapacityError, ConnectionFailedError) as error:
                    errors.append(error)
                _known_loads.pop(self.url or "", None)
                self.use_next()
            full = [error for error in errors if isinstance(error, CapacityError)]
            is_due = len(full) < len(errors) or clock() - self._listed_at > LIST_INTERVAL_S
            were_new, are_new = are_new, is_due and await self._list()
            if are_new and not were_new:  # servers that fail as fast as new ones start are not tried for ever
                continue
            if full:
                await wait.pause(full[-1])
                retry_until = clock() + retry_for_s
                backoff.reset()
            elif clock() + (pause_s := backoff.next_s()) > retry_until:
                raise errors[-1]
            else:
                await asyncio.sleep(pause_s)

    async def explain(self, error: ClientError) -> ClientError:
        """Return the error with the last output of the server's process, if the provider has it."""
        if self.provider is None or not isinstance(error, ConnectionFailedError | ConnectionLostError):
            return error
        output = await asyncio.to_thread(describe_death, self.provider)
        return type(error)(f"{error}{output}") if output else error

    def abort_start(self) -> None:
        """Stop waiting for a start in progress; `stop` then ends the start."""
        if self._start is not None:
            self._start.cancel()

    async def stop(self) -> None:
        """Stop the provider's server, if there is one."""
        if self.provider is None:
            return
        try:
            stopping = asyncio.get_running_loop().run_in_executor(None, self.provider.stop)
        except RuntimeError:  # the interpreter is exiting, and starts no more threads
            self.provider.stop()
        else:
            await stopping

    async def _list(self) -> bool:
        """Take the servers that a fleet has now, in random order; return whether some are new.

        Without any, those that are known are kept.
        """
        if self.list_urls is None:
            return False
        self._listed_at = asyncio.get_running_loop().time()
        urls: Sequence[str] = ()
        with suppress(ProviderError):  # the engine does not answer; the servers may
            urls = await asyncio.to_thread(self.list_urls)
        if not urls:
            return False
        known, self.urls = self.urls, validate_urls(urls)
        self.url = self.urls[0]
        return not set(urls) <= set(known)

    async def _prefer_emptier(self) -> None:
        """Make the emptier of the first two servers the current one; the order of all is random.

        The better of two random choices keeps a crowd of clients, which know nothing of each other, from rushing to the
        one server that is the emptiest (Mitzenmacher 2001). A server that does not say how full it is, such as a
        released one, counts as empty; one that is not there as full.
        """
        first, second = pair = self.urls[:2]
        now = time.monotonic()
        if expired := [url for url in pair if url not in _known_loads or _known_loads[url].until < now]:
            old = [_known_loads[url] for url in expired if url in _known_loads]
            for load in old:  # other clients use it meanwhile
                load.until = now + LOAD_AGE_S
            measured = await asyncio.gather(*(self._measure_load(url) for url in expired))
            for url, load in zip(expired, measured, strict=True):
                # One that another client has measured meanwhile has its sessions, too.
                if _known_loads.setdefault(url, load) in old:
                    _known_loads[url] = load
        loads = [_known_loads.get(url, _KnownLoad(0.0)) for url in pair]
        if loads[1].value < loads[0].value:
            self.urls = [second, first, *self.urls[2:]]  # a fork shares the list with its parent
            self.url = second
        chosen = min(loads, key=lambda load: load.value)
        chosen.value += chosen.of_one

    async def _measure_load(self, url: str) -> _KnownLoad:
        """Return how full a server is.

        Without httpx, whose clients take longer for this than the connect that follows.
        """
        load = _KnownLoad(0.0, until=time.monotonic() + LOAD_AGE_S)
        parts = urlsplit(http_url(url))
        if parts.scheme != "http" or proxy_for(url) is not None:
            return load  # not worth another TLS handshake
        fields = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", **self._headers}
        lines = [
            f"GET {parts.path}/capacity HTTP/1.0",
            *(f"{name}: {value}" for name, value in fields.items()),
        ]
        try:
            async with asyncio.timeout(CAPACITY_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
                try:
                    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
                    answer = b"".join([line async for line in reader])
                finally:
                    writer.close()
        except (OSError, ValueError):  # a timeout too; a line beyond the reader's limit
            load.value = float("inf")
        else:
            with suppress(ValueError, KeyError, TypeError, ZeroDivisionError):
                numbers = json.loads(answer.partition(b"\r\n\r\n")[2])
                load.value = float((numbers["in_use"] + numbers["waiting"]) / numbers["slots"])
                load.of_one = 1 / numbers["slots"]
        return load

    async def _start_provider(self, provider: "Provider") -> str:
        """Start the server in a thread, and return its URL."""
        self._start = start = start_in_thread(provider.start)
        try:
            await asyncio.wait({start})
        except asyncio.CancelledError:
            start.cancel()
            raise
        finally:
            self._start = None
        if start.cancelled():
            raise ClientClosedError(
                "expected a server to start, but the client was closed meanwhile; make a new client"
            )
        return start.result()
