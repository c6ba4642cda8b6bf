"""Connections to servers inside sandboxes, forwarded through the sandboxes' agents without a port on the host."""

import asyncio
import os
import re
import socket
import struct
from contextlib import suppress
from itertools import count
from secrets import token_hex
from typing import Final

from starlette.types import Receive, Scope, Send

from servers.fleet.peers import UnixPeers
from servers.sandboxes.guest import GuestError
from servers.sandboxes.table import Record, SandboxTable
from servers.security import HttpRefusalError, send_refusal

OURS: Final = (49983, 49999)
"""E2B's own ports, which need no server inside: one for commands and files, one for code."""

MAX_FORWARDED_PORTS: Final = 16
"""Forwarded ports per sandbox."""

REPLY_TIMEOUT_S: Final = 3600.0
_PEER: Final = struct.Struct("3i")
PATH: Final = re.compile(r"/sandboxes/([0-9a-f]{20})/ports/(\d{1,5})(/.*|)")


class Ports:
    """Forwards HTTP and WebSocket connections to ports inside sandboxes.

    Args:
        table: The sandboxes.
    """

    def __init__(self, table: SandboxTable) -> None:
        self._table = table
        self._forwards: dict[tuple[str, int], tuple[int, asyncio.Server]] = {}
        self._opening = asyncio.Lock()
        self._numbers = count()
        # Abstract names: socket files would remain if this process were killed.
        self._name = f"\0ropewalk-{token_hex(16)}-{{}}".format
        self._peers = UnixPeers(self._name, REPLY_TIMEOUT_S)

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, sandbox: str | None, port: int | None
    ) -> bool:
        """Forward a connection if it is for a server inside a sandbox; return whether it was."""
        if match := PATH.fullmatch(scope["path"]):
            sandbox, port, path = match[1], int(match[2]), match[3] or "/"
            raw = scope["raw_path"].partition(b"/ports/")[2].partition(b"/")[2]
            scope = {**scope, "path": path, "raw_path": b"/" + raw}
        elif sandbox is None or port is None or port in OURS:
            return False
        record = self._table.find(sandbox)
        if record is None or record.paused or not 0 < port < 65_536 or port in OURS:
            await send_refusal(HttpRefusalError(502, f"The sandbox {sandbox!r} was not found"), scope, send)
            return True
        forwards = sum(name == record.id for name, _ in self._forwards)
        if (record.id, port) not in self._forwards and forwards >= MAX_FORWARDED_PORTS:
            text = f"{MAX_FORWARDED_PORTS} ports of the sandbox are forwarded, the most allowed"
            await send_refusal(HttpRefusalError(429, text), scope, send)
            return True
        number = await self._open_forward(record, port)
        forward = self._peers.socket if scope["type"] == "websocket" else self._peers.http
        await forward(number, scope, receive, send)
        return True

    async def close(self) -> None:
        """Close all forwards and their connections."""
        await self._peers.close()
        for _, server in self._forwards.values():
            server.close()

    async def _open_forward(self, record: Record, port: int) -> int:
        """Return the number of the Unix socket that forwards to a port inside; open it if needed."""
        async with self._opening:  # otherwise two concurrent requests would open two
            if (record.id, port) not in self._forwards:
                number = next(self._numbers)

                async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    await _carry(record, port, reader, writer)

                server = await asyncio.start_unix_server(carry, self._name(number))
                self._forwards[record.id, port] = (number, server)
                record.guest.gone.add_done_callback(lambda _: self._close_forward(record.id, port))
            return self._forwards[record.id, port][0]

    def _close_forward(self, sandbox: str, port: int) -> None:
        number, server = self._forwards.pop((sandbox, port))
        server.close()
        self._table.spawn(self._peers.close_worker(number), f"connections to port {port} of {sandbox}")


async def _carry(
    record: Record, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    guest, socket_ = record.guest, writer.get_extra_info("socket")
    _, uid, _ = _PEER.unpack(socket_.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():  # any user of this machine can list abstract sockets
        writer.close()
        return
    async with guest.subscribed(f"t{guest.name()}") as output:

        async def upwards() -> None:
            while (message := await output.take()) is not None and "end" not in message[0]:
                writer.write(message[1])
                await writer.drain()

        async def downwards() -> None:
            while data := await reader.read(1 << 16):
                await guest.ask("send", data, stream=output.stream)

        with suppress(OSError, GuestError):
            await guest.ask("connect", stream=output.stream, port=port)
            tasks = [asyncio.create_task(upwards()), asyncio.create_task(downwards())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                guest.notify("disconnect", stream=output.stream)
    writer.close()
