"""A TCP proxy that cuts, stalls or half-closes its connections on request."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress


class FaultyProxy:
    """A proxy between clients and a server.

    Attributes:
        port: Port that it listens on.
        connections: Number of connections so far.
        passed: Chunks forwarded, in both directions.
        delay_s: Delay of data from the server.
        cut_after: Called for each new connection; returns after how many bytes to the server and from it to cut the
            connection, None for never.
    """

    def __init__(self, address: str) -> None:
        self.port = 0
        self.server: asyncio.Server | None = None
        self.connections = 0
        self.passed = 0
        self.delay_s = 0.0
        self.cut_after: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)
        self._address = address
        self._open: list[list[asyncio.StreamWriter]] = []
        self._held: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Abort every connection on both sides."""
        for writers in self._open:
            for writer in writers:
                writer.transport.abort()

    def stop(self) -> None:
        """Abort every connection, and stop listening."""
        assert self.server is not None
        self.server.close()
        self.cut()

    def half_close(self) -> None:
        """Send EOF to the server on every connection; the clients do not notice."""
        for _, server in self._open:
            with suppress(OSError, RuntimeError):
                server.write_eof()

    def hold(self) -> None:
        """Silently drop all further data of the current connections."""
        for writers in self._open:
            self._held.update(writers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        limits = self.cut_after()
        try:
            there, server = await asyncio.open_connection(*self._address.split(":"))
        except OSError:
            writer.transport.abort()
            return
        both = [writer, server]
        self._open.append(both)
        try:
            ways = [
                asyncio.create_task(self._pump(reader, server, limits[0])),
                asyncio.create_task(self._pump(there, writer, limits[1], late=True)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
        finally:
            self._open.remove(both)
            for one in both:
                self._held.discard(one)
                one.transport.abort()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        left: int | None,
        *,
        late: bool = False,
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                if late:
                    await asyncio.sleep(self.delay_s)
                if sink in self._held:
                    continue
                if left is not None:
                    data, left = data[:left], left - len(data)
                self.passed += 1
                sink.write(data)
                await sink.drain()
                if left is not None and left <= 0:
                    return
            if sink in self._held:
                await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def faulty_proxy(address: str) -> AsyncIterator[FaultyProxy]:
    """Run a proxy to the server at an address."""
    proxy = FaultyProxy(address)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.server = server
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            proxy.cut()
