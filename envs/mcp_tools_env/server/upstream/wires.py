"""The two ways to a tool server: a process of its own, and an address."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mcp.client import Transport

from .errors import FirstFailure
from .http import http_wire
from .stdio import ServerProcess, stdio_wire


class UpstreamWire(Protocol):
    """How a server is reached."""

    fault: FirstFailure

    async def open(self) -> Transport:
        """Return the streams, to be entered."""

    async def died(self) -> str:
        """Return how it died, once it has; never where that only shows when it is asked."""

    def is_gone(self) -> bool:
        """Whether it has died by now, or as good as: nobody reads what it is sent."""

    def last_words(self) -> str:
        """Return what it said last, beside its answers."""

    async def close(self) -> None:
        """Give back what `open` took. Bounded in time."""


class StdioWire:
    """A server that is a process."""

    def __init__(
        self, command: tuple[str, ...], environment: Mapping[str, str], cwd: Path, folder: Path
    ) -> None:
        self.fault = FirstFailure()
        self._what = command, environment, cwd, folder
        self._process: ServerProcess | None = None

    async def open(self) -> Transport:
        """Start the process and return its streams."""
        self._process = await ServerProcess.start(*self._what)
        return stdio_wire(self._process, self.fault)

    async def died(self) -> str:
        """Return how the process ended, once it has."""
        if self._process is None:
            return "was not started"
        await self._process.ended.wait()
        return self._process.epitaph()

    def is_gone(self) -> bool:
        """Whether nobody reads its standard input any more."""
        return self._process is None or not self._process.reads()

    def last_words(self) -> str:
        """Return the end of its standard error."""
        return "" if self._process is None else self._process.stderr[-500:]

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.close()


class HttpWire:
    """A server at an address."""

    def __init__(self, url: str, headers: Mapping[str, str], *, allow_private: bool) -> None:
        self.fault = FirstFailure()
        self._what = url, dict(headers)
        self._allow_private = allow_private

    async def open(self) -> Transport:
        """Return the streams; nothing is connected yet."""
        return http_wire(*self._what, self.fault, allow_private=self._allow_private)

    async def died(self) -> str:
        """Wait for ever: a server at an address is asked, or it is not known."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    def is_gone(self) -> bool:
        """Return false: it is asked, or it is not known."""
        return False

    def last_words(self) -> str:
        """Return nothing: it has no other voice."""
        return ""

    async def close(self) -> None:
        """Do nothing: the streams take all with them."""
