"""The client of a sandbox's agent: requests, streamed output, and the failure of both when the agent dies.

Nothing that arrives is trusted: the code in the sandbox may have written it. An invalid frame ends the sandbox.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from openenv_core.errors import PicklableError
from openenv_core.sandbox.inside.interpreter import FRAME, pack

CALL_TIMEOUT_S: Final = 30.0
MAX_HEADER: Final = 64 << 10
MAX_UNREAD: Final = 4 << 20
"""Bytes sent to the agent that it has not read."""

_FRAME_BYTES: Final = 256
"""Approximate memory of a frame beside its content."""

MAX_BLOB: Final = 32 << 20
"""Bytes of one frame's content, such as a displayed result in JSON; files and output come in smaller pieces."""

MAX_BUFFERED: Final = 2 * MAX_BLOB


STATUSES: Final = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "permission_denied": 400,  # E2B's clients have no particular error for 403
    "unauthenticated": 401,
    "not_found": 404,
    "aborted": 409,
    "already_exists": 409,
    "resource_exhausted": 507,
    "unimplemented": 501,
    "unavailable": 502,
    "deadline_exceeded": 504,
}


class ApiError(PicklableError):
    """A refused request.

    Args:
        code: The HTTP status, which decides the error that a client raises; or a Connect RPC error code.
        message: What is wrong, and what to do about it.
    """

    def __init__(self, code: int | str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = code if isinstance(code, int) else STATUSES.get(code, 500)


class GuestError(ApiError):
    """A sandbox's agent refused or failed a request."""


class Reader(Protocol):
    """A source of frames."""

    async def readexactly(self, n: int, /) -> bytes:
        """Return exactly `n` bytes; EOFError (such as IncompleteReadError) if the stream ends first."""


class Subscription:
    """The messages of one stream, in order, for one reader.

    The agent waits for the fastest reader; for one that falls behind by more than `MAX_BUFFERED` bytes the stream
    ends, marked as lost.
    """

    def __init__(self, stream: str, on_taken: Callable[[int], None]) -> None:
        self.stream = stream
        self._on_taken = on_taken
        self._queue: asyncio.Queue[tuple[dict[str, Any], bytes, int]] = asyncio.Queue()
        self._bytes = 0

    def put(self, header: dict[str, Any], blob: bytes, size: int = 0) -> None:
        """Add a message whose frame has `size` bytes."""
        self._bytes += size + _FRAME_BYTES
        if self._bytes > MAX_BUFFERED:
            self.close()
            header, blob = {"end": -1, "lost": True, "status": "its output was not read in time"}, b""
        self._queue.put_nowait((header, blob, size))

    async def take(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """Return the next message; None if none arrives within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return self._credit(await self._queue.get())
        except TimeoutError:
            return None

    def close(self) -> None:
        """Discard the unread messages."""
        while not self._queue.empty():
            self._credit(self._queue.get_nowait())

    def _credit(self, message: tuple[dict[str, Any], bytes, int]) -> tuple[dict[str, Any], bytes]:
        header, blob, size = message
        self._bytes -= size + _FRAME_BYTES
        if "pipe" in header:
            self._on_taken(len(blob))
        return header, blob


class Guest:
    """The client of a sandbox's agent.

    Args:
        reader: Reads the agent's frames.
        writer: Writes frames to the agent.

    Attributes:
        gone: Resolves with the reason when the agent has ended.
        deadlines: Timers by stream, cancelled at the stream's end.
    """

    def __init__(self, reader: Reader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._streams: dict[str, list[Subscription]] = {}
        self.deadlines: dict[str, asyncio.TimerHandle] = {}
        self.home = ""
        self.user = ""
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_ready = asyncio.Event()
        self._task = asyncio.create_task(self._read(), name="sandbox's agent")

    async def wait_ready(self, envs: dict[str, str], timeout_s: float) -> None:
        """Wait for the agent's greeting, then set its environment variables.

        Raises:
            GuestError: The greeting did not come in time, or the agent has ended.
        """
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._is_ready.wait()), self.gone]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waits[0].cancel()
        if not self._is_ready.is_set():
            reason = self.gone.result() if self.gone.done() else f"nothing within {timeout_s:g} s"
            raise GuestError("unavailable", f"the sandbox did not begin: {reason}")
        await self.ask("setup", envs=envs)

    def name(self) -> str:
        """Return a unique name for a stream, context or watcher."""
        return str(next(self._numbers))

    def notify(self, op: str, **fields: Any) -> None:
        """Send a request without waiting for its reply."""
        if self.gone.done():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            self._on_closed("its agent does not read its requests")
            return
        self._writer.write(pack({"id": 0, "op": op, **fields}))

    def require(self) -> None:
        """Raise a GuestError if the agent is gone."""
        if self.gone.done():
            raise GuestError("unavailable", f"the sandbox was not found: {self.gone.result()}")

    async def ask(self, op: str, blob: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the reply; GuestError if it is refused, times out or the agent is gone."""
        self.require()
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(pack({"id": number, "op": op, **fields}, blob))
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._writer.drain()
                header, data = await answer
        except TimeoutError:
            raise GuestError("deadline_exceeded", f"no answer within {CALL_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise GuestError("unavailable", f"the sandbox was not found: {error}") from None
        finally:
            self._answers.pop(number, None)
        if "error" in header:
            raise GuestError(str(header["error"]), str(header.get("message", "")))
        return header, data

    @asynccontextmanager
    async def subscribed(self, stream: str) -> AsyncIterator[Subscription]:
        """Subscribe to a stream while the block runs."""
        subscription = Subscription(stream, lambda size: self._acknowledge(stream, size))
        self._streams.setdefault(stream, []).append(subscription)
        try:
            yield subscription
        finally:
            self._streams[stream].remove(subscription)
            if not self._streams[stream]:
                del self._streams[stream]
            subscription.close()

    async def close(self) -> None:
        """Close the channel; pending requests fail."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._on_closed("it was ended")
        self._writer.close()

    def _acknowledge(self, stream: str, size: int) -> None:
        self.notify("acknowledge", stream=stream, bytes=size)

    async def _read(self) -> None:
        reason = "its agent has ended"
        try:
            while True:
                head, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                if head > MAX_HEADER or size > MAX_BLOB:
                    raise ValueError(f"a frame of {head} and {size} bytes")
                header = json.loads(await self._reader.readexactly(head))
                if type(header) is not dict:
                    raise ValueError("a header that is not an object")
                self._on_frame(header, await self._reader.readexactly(size) if size else b"", head + size)
        except (EOFError, OSError):
            pass
        except Exception as error:  # a forged frame may raise anything
            reason = f"its agent sent an invalid frame ({type(error).__name__}: {error})"
        self._on_closed(reason)

    def _on_frame(self, header: dict[str, Any], blob: bytes, size: int) -> None:
        if "stream" in header:
            stream = str(header["stream"])
            if "end" in header and (deadline := self.deadlines.pop(stream, None)) is not None:
                deadline.cancel()
            readers = self._streams.get(stream, ())
            for each in readers:
                each.put(header, blob, size)
            if "pipe" in header and not readers:
                self._acknowledge(stream, len(blob))
        elif "hello" in header:
            self.home, self.user = str(header["home"]), str(header["user"])
            self._is_ready.set()
        elif (answer := self._answers.get(int(header["id"]))) is not None and not answer.done():
            answer.set_result((header, blob))

    def _on_closed(self, reason: str) -> None:
        if self.gone.done():
            return
        self.gone.set_result(reason)
        for deadline in self.deadlines.values():
            deadline.cancel()
        self.deadlines.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(GuestError("unavailable", f"the sandbox was not found: {reason}"))
        for stream, readers in self._streams.items():
            for each in readers:
                each.put({"stream": stream, "end": -1, "status": reason, "lost": True}, b"")
