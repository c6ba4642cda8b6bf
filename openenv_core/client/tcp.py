"""What the client does below WebSockets: connections to whichever address answers, and how long one was silent."""

import asyncio
import os
import socket
import struct
import sys
from typing import Final

_LAST_DATA_RECEIVED: Final = struct.Struct("=52xI")
"""Milliseconds since data came, in the `tcp_info` of Linux."""


async def dial(host: str, port: int, within_s: float) -> socket.socket:
    """Return a connected socket: to the first address of the host that answers.

    No address gets more than its share of the time, so that one behind a firewall does not hide the next.

    Raises:
        OSError: None does.
    """
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in addresses:
        raw = socket.socket(family, kind, protocol)
        try:
            raw.setblocking(False)
            async with asyncio.timeout(within_s / len(addresses)):
                await loop.sock_connect(raw, address)
        except OSError as error:  # TimeoutError is one
            raw.close()
            failure = error
        except BaseException:
            raw.close()
            raise
        else:
            return raw
    raise failure or OSError(f"no address of {host!r}")


def silence(fd: int) -> float | None:
    """Return for how many seconds the other end of a TCP connection has sent nothing; None where that is unknown."""
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(fileno=os.dup(fd)) as twin:
            info = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.size)
    except OSError:
        return None
    return (
        float(_LAST_DATA_RECEIVED.unpack(info)[0]) / 1000 if len(info) == _LAST_DATA_RECEIVED.size else None
    )
