"""The wire to a tool server's process: one JSON-RPC message a line, as the SDK's streams."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError

from .errors import ServerFailed
from .fault import Fault
from .process import CHUNK, ServerProcess
from .weight import MAX_VALUES, Pace, Weight

MAX_MESSAGE_BYTES: Final = 32 << 20
"""The longest message that a tool server may write."""

PRINTED: Final = 16
"""How many lines cost as much time as one message, where they are none."""

MAX_BROKEN: Final = 64
"""How many messages that are none a tool server may write; after that it is not listened to any more."""

MAX_UNREAD_BYTES: Final = 32 << 20
"""What may wait for a tool server that does not read."""


def stdio_wire(process: ServerProcess, fault: Fault) -> Transport:
    """Return the streams of a process, as `mcp.Client` enters them. The process is its owner's to end.

    Lines that are no JSON objects are passed over, and so are those that have nothing of a message: many a server
    prints, objects too, and a policy may have a part in what. One that looks like a message and is none is a fault,
    and so is one that is too long: somebody waits for the answer that it was to be.
    """
    return _wire(process, fault)


@asynccontextmanager
async def _wire(
    process: ServerProcess, fault: Fault
) -> AsyncIterator[
    tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
]:
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with to_session:
            lines, pace, broken = _Lines(fault), Pace(), 0
            while data := await process.stdout.read(CHUNK):
                await pace.keep(data.count(b"\n") // PRINTED)
                for line in lines.of(data):
                    await pace.keep()
                    if (message := _message(line, fault)) is None:
                        broken += _is_like_an_answer(line)
                        if broken > MAX_BROKEN:
                            return
                        continue
                    try:
                        await to_session.send(message)
                    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                        return

    async def write() -> None:
        async with from_session:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    unread = process.write(text.encode() + b"\n")
                except ServerFailed:
                    await to_session.aclose()
                    return
                if unread > MAX_UNREAD_BYTES:
                    fault.tell("it does not read what it is sent")
                    await to_session.aclose()
                    return

    async with from_server, to_server, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield from_server, to_server
        finally:
            tasks.cancel_scope.cancel()


def _message(line: bytes, fault: Fault) -> SessionMessage | None:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError:
        if (mended := _mended(line)) is not None:
            return SessionMessage(mended)
        if not _is_like_an_answer(line):
            return None
        fault.tell(f"it wrote what is no JSON-RPC message: {line[:200].decode(errors='replace')!r}")
        return None


def _is_like_an_answer(line: bytes) -> bool:
    return any(key in line for key in (b'"jsonrpc"', b'"result"', b'"error"', b'"id"'))


def _mended(line: bytes) -> JSONRPCMessage | None:
    """Return a message whose texts hold halves of characters, as JavaScript's may: a tool cut one in two."""
    if b"\\ud" not in line.lower():
        return None
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
        return jsonrpc_message_adapter.validate_json(text, by_name=False)
    except (ValueError, RecursionError):
        return None


class _Lines:
    """Cuts what comes into lines, and drops those that are too long."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._parts: list[bytes] = []
        self._length = 0
        self._dropping = False

    def of(self, data: bytes) -> list[bytes]:
        """Return the lines that begin as objects do and end in this data."""
        found = []
        if b"{" not in data:
            # What only prints is not cut up, but for the ends of its first line and of its last.
            data = b"\n".join(data.split(b"\n", 1)[:1] + data.rsplit(b"\n", 1)[1:])
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._add(part)
            if not self._dropping and (line := b"".join(self._parts).strip()).startswith(b"{"):
                if len(line) <= MAX_VALUES or Weight().add(line):
                    found.append(line)
                else:
                    self._fault.tell(
                        f"it wrote a message of more than {MAX_VALUES} values, which is the most here"
                    )
            self._parts, self._length, self._dropping = [], 0, False
        self._add(rest)
        return found

    def _add(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > MAX_MESSAGE_BYTES and not self._dropping:
            self._dropping = True
            self._parts = []
            self._fault.tell(
                f"it wrote a message of more than {MAX_MESSAGE_BYTES} bytes, which is the most here"
            )
        if part and not self._dropping:
            self._parts.append(part)
