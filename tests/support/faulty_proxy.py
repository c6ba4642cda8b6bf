"""A TCP proxy that cuts, holds or half-closes what goes through it, where a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress


class FaultyProxy:
    """Between a client and a server.

    Attributes:
        port: Where it listens.
        connections: How many there were.
        passed: Chunks that went through, either way.
        delay_s: How late what comes from the server is passed on.
        cut_after: Says, of a connection that begins, after how many bytes to the server and from it that is cut; None
            lets it be.
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
        """Break every connection, both ways."""
        for writers in self._open:
            for writer in writers:
                writer.transport.abort()

    def stop(self) -> None:
        """Break every connection, and listen no more."""
        assert self.server is not None
        self.server.close()
        self.cut()

    def half_close(self) -> None:
        """Tell the servers that their clients send nothing more; the clients hear nothing of it."""
        for _, server in self._open:
            with suppress(OSError, RuntimeError):
                server.write_eof()

    def hold(self) -> None:
        """Let nothing more through on the connections that there are; nobody hears of it."""
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
    """Stand between clients and the server at an address."""
    proxy = FaultyProxy(address)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.server = server
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            proxy.cut()
