"""Connections to the standard streams of a command in a container.

The Docker SDK gives the socket of such a connection only after it has read, and lost, what came with the response's
head, and it has no asyncio; so this one request is made here.
"""

import asyncio
import os
import ssl
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from openenv_core.errors import EngineRefusedError

STDOUT: Final = 1

MAX_STDERR_BYTES: Final = 4096
"""How much of a command's standard error is kept, of its end."""


class EngineAddress(NamedTuple):
    """The address of a Docker engine.

    Attributes:
        url: unix:///path or tcp://host:port.
        certificates: Folder with ca.pem, cert.pem and key.pem; None for no TLS.
        verify: Whether to verify the engine's certificate.
    """

    url: str
    certificates: str | None = None
    verify: bool = True


class ExecReader:
    """Reads the output of a command, which the engine sends in pieces, each after its stream and length.

    Attributes:
        stderr: The end of the standard error that `readexactly` has passed over.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._held = bytearray()
        self._left = self._stream = 0
        self.stderr = bytearray()

    async def read_any(self) -> bytes:
        """Return what has come next, of either stream; b"" at the end."""
        while not self._left:
            try:
                header = await self._reader.readexactly(8)
            except asyncio.IncompleteReadError:
                return b""
            self._stream, self._left = header[0], int.from_bytes(header[4:], "big")
        data = await self._reader.read(min(self._left, 1 << 16))
        self._left -= len(data)
        return data

    async def readexactly(self, n: int, /) -> bytes:
        """Return `n` bytes of the standard output; IncompleteReadError, an EOFError, if it ends before."""
        while len(self._held) < n:
            if not (data := await self.read_any()):
                raise asyncio.IncompleteReadError(b"", n)
            if self._stream == STDOUT:
                self._held += data
            else:
                self.stderr += data
                del self.stderr[:-MAX_STDERR_BYTES]
        data = bytes(self._held[:n])
        del self._held[:n]
        return data

    async def read_rest(self, most: int) -> bytes:
        """Return up to `most` bytes of what is left of the standard output, and of the standard error."""
        while len(self._held) < most and (data := await self.read_any()):
            self._held += data
        return bytes(self._held[:most] + self.stderr)


async def attach(address: EngineAddress, exec_id: str) -> tuple[ExecReader, asyncio.StreamWriter]:
    """Start a command that `DockerEngine.create_exec` has prepared; return its output and its standard input.

    Raises:
        OSError: The engine cannot be reached, or ends the connection.
        EngineRefusedError: The engine cannot start the command.
    """
    parts = urlsplit(address.url)
    if parts.scheme == "unix":
        reader, writer = await asyncio.open_unix_connection(parts.path)
    else:
        reader, writer = await asyncio.open_connection(
            parts.hostname or "127.0.0.1", parts.port or 2375, ssl=_make_tls(address)
        )
    start = b'{"Detach": false, "Tty": false}'
    request = (
        b"POST /exec/%s/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
        b"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: %d\r\n\r\n%s"
    )
    try:
        writer.write(request % (exec_id.encode(), len(start), start))
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status not in (101, 200):
            reason = (await reader.read(1000)).decode(errors="replace").strip()
            raise EngineRefusedError(
                f"expected the Docker engine to start a command in a container, got {status}: {reason}",
                status,
                reason,
            )
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
        writer.close()
        raise ConnectionResetError(f"the engine did not start a command: {error}") from error
    except BaseException:
        writer.close()
        raise
    return ExecReader(reader), writer


def _make_tls(address: EngineAddress) -> ssl.SSLContext | None:
    if (folder := address.certificates) is None:
        return None
    context = ssl.create_default_context()
    if not address.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if os.path.exists(ca := os.path.join(folder, "ca.pem")):
        context.load_verify_locations(ca)
    if os.path.exists(certificate := os.path.join(folder, "cert.pem")):
        context.load_cert_chain(certificate, os.path.join(folder, "key.pem"))
    return context
