"""What connects a process of the sandbox with its supervisor, and the words by which it shows itself."""

import array
import asyncio
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * 4)


@dataclass(slots=True)
class Ends:
    """Both ends of a control socket and of two pipes.

    Attributes:
        control: Ours. What comes from it says which process it came from.
        stdout: Ours, to be read.
        stderr: Likewise.
        inner: Theirs: control, stdout, stderr.
    """

    control: socket.socket
    stdout: int
    stderr: int
    inner: list[int]

    def hand_over(self) -> None:
        """Close those that are theirs by now."""
        inner, self.inner = self.inner, []
        for descriptor in inner:
            os.close(descriptor)


def make_ends() -> Ends:
    """Make a set of connections."""
    control, inner = socket.socketpair()
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    control.setblocking(False)
    stdout, inner_stdout = os.pipe2(os.O_CLOEXEC)
    stderr, inner_stderr = os.pipe2(os.O_CLOEXEC)
    return Ends(control, stdout, stderr, [inner.detach(), inner_stdout, inner_stderr])


def receive(control: socket.socket, most: int) -> tuple[bytes, int | None, list[int]]:
    """Return bytes, the process that they came from, and the descriptors that came along.

    The kernel has translated the process's number into one of this process's own name space.

    Raises:
        OSError: There are none, or the connection is broken.
    """
    data, ancillary, _, _ = control.recvmsg(most, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    process, descriptors = None, array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content)
        elif kind == socket.SCM_CREDENTIALS:
            process = _CREDENTIALS.unpack(content)[0]
    return data, process or None, list(descriptors)


async def hear(
    control: socket.socket, over: asyncio.Future[Any], expected: bytes
) -> tuple[int, list[int]] | None:
    """Wait for one word.

    Args:
        control: Where it comes from.
        over: Done when nothing will come any more.
        expected: The word.

    Returns:
        The process that said it, and the descriptors that came along; None where it did not come.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control.fileno(), _set, readable)
    waiting: Iterable[asyncio.Future[Any]] = (readable, over)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(control.fileno())
    try:
        # One byte at a time: the words of two processes must not come as one.
        word, process, descriptors = receive(control, 1)
    except OSError:
        return None
    if word == expected and process is not None:
        return process, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
