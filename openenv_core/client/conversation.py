"""Requests and replies over one carrier: which reply is whose, and who may send next."""

import asyncio
from collections import deque
from typing import Any, Final, NoReturn

from openenv_core.client.carrier import Carrier, ReplyOverdueError
from openenv_core.errors import (
    CapacityError,
    ClientError,
    ConnectionLostError,
    FactoryError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
    SessionError,
)
from openenv_core.protocol.replies import decode_reply
from openenv_core.watchdog import Watchdog

SESSION_ENDED: Final = (CapacityError, FactoryError, SessionError)
"""What a server says last."""


class Conversation:
    """Asks one thing at a time, and counts the replies that nobody waits for any more.

    Args:
        carrier: Carries the frames.
        timeout_s: Seconds that a reply may take; None waits for ever.

    Attributes:
        carrier: Carries them.
        reply: The frame that answered last.
    """

    __slots__ = ("_overdue", "_stale", "_timeout_s", "_watchdog", "carrier", "reply")

    def __init__(self, carrier: Carrier, timeout_s: float | None) -> None:
        self.carrier = carrier
        self.reply: bytes | bytearray = b""
        self._timeout_s = timeout_s
        self._watchdog = Watchdog(timeout_s, self._expire)
        self._overdue = False
        self._stale = 0  # replies still to come that nobody waits for

    async def ask(self, frame: bytes, expected: str) -> dict[str, Any]:
        """Send a frame and return the data of what answers it.

        Cancelled, or out of time, the reply is dropped when it comes.

        Raises:
            RequestTimeoutError: No reply came in time.
            ConnectionLostError: The connection has broken.
            ServerError: The reply is an error, or the server said, before it was asked, why the session is over.
            ProtocolError: The server said something else.
        """
        carrier = self.carrier
        dropped: bytes | bytearray | None = None
        self._overdue = False
        self._watchdog.start()
        try:
            if len(carrier.unread) > self._stale:
                await self._raise_unasked()
            try:
                # A server that refuses a session says why before it closes: what it said is read first.
                if carrier.full:
                    await carrier.wait_room()
                carrier.send(frame)
            except ConnectionLostError:
                pass
            self._stale += 1
            while True:
                reply = await carrier.recv()  # cancelled here, the reply stays counted as stale
                self._stale -= 1
                if not self._stale:
                    break
                dropped = reply
                if self._overdue:
                    raise ReplyOverdueError
        except ReplyOverdueError:
            raise RequestTimeoutError(
                f"expected a reply within {self._timeout_s:g} s, got none yet; the session lives on and "
                "drops the reply when it comes. Ask again, or raise message_timeout_s"
            ) from None
        except ConnectionLostError:
            if dropped is not None:
                _raise_if_ended(dropped)
            raise
        finally:
            self._watchdog.stop()
        self.reply = reply
        return decode_reply(reply, expected)

    def end(self) -> None:
        """Ask nothing more."""
        self._watchdog.close()

    async def _raise_unasked(self) -> NoReturn:
        """Raise what the server said that was not asked. Whoever counts replies cannot go on behind that.

        Raises:
            ServerError: Why the session is over, as servers say it that have no room.
            ProtocolError: Anything else, a second reply to one request for instance.
        """
        for _ in range(self._stale):
            await self.carrier.recv()
        frame = await self.carrier.recv()
        try:
            decode_reply(frame, "")
        except ServerError:
            raise
        except ProtocolError:
            pass
        raise ProtocolError(
            f"expected one answer to each request, got {frame[:200]!r} unasked; the session is over, since replies "
            "could be taken for those of other requests"
        )

    def _expire(self) -> None:
        self._overdue = True
        self.carrier.interrupt()


def _raise_if_ended(frame: bytes | bytearray) -> None:
    """Raise what a frame says, if that is why the session is over."""
    try:
        decode_reply(frame, "")
    except SESSION_ENDED:
        raise
    except ClientError:
        pass


class FairLock:
    """A fair lock that costs next to nothing while nobody else wants it.

    with await lock.wait():
        ...
    """

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> bool:
        """Whether somebody has it."""
        return self._taken

    def take(self) -> bool:
        """Take it if nobody has it; return whether that is so."""
        if self._taken:
            return False
        self._taken = True
        return True

    async def wait(self) -> "FairLock":
        """Take it once those have had it who asked before."""
        if self.take():
            return self
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was handed over just now
                self.release()
            raise
        return self

    def release(self) -> None:
        """Hand it to whoever has waited longest."""
        while self._waiting:
            heir = self._waiting.popleft()
            if not heir.done():
                heir.set_result(None)  # and it stays taken: nobody may come in between
                return
        self._taken = False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.release()
