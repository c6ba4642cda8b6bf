"""The messages of one kernel over one WebSocket: Jupyter's messaging protocol 5, as JSON."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from openenv_core.errors import ConfigurationError
from openenv_core.proxies import proxy_for

from ..hosted import HostFailure
from .settings import JupyterSettings

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Message: TypeAlias = Mapping[str, Any]

VERSION: Final = "5.3"
MOST_QUEUED: Final = 4

TOO_LARGE: Final = 1009
"""Our own code for hanging up on a message that is larger than we take."""

_quiet = logging.getLogger("openenv_core.jupyter")
_quiet.setLevel(logging.WARNING)
"""A connection's own log has its headers, token and all, in its lowest level."""


class Asked:
    """A request on its way.

    Args:
        heard: Called with each message that the kernel publishes because of it.

    Attributes:
        done: Has the reply's content once there is a reply and all was published.
    """

    def __init__(self, heard: Callable[[str, Message], None]) -> None:
        self.done: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.heard = heard
        self._reply: Message | None = None
        self._idle = False

    def hear(self, message: Message, kind: str, content: Message) -> None:
        """Take in one message."""
        if kind == "status":
            self._idle = self._idle or content.get("execution_state") == "idle"
        elif kind.endswith("_reply") and message.get("channel") == "shell":
            self._reply = content
        else:
            self.heard(kind, content)
        if self._idle and self._reply is not None and not self.done.done():
            self.done.set_result(self._reply)


class Channel:
    """A kernel's channels. One request at a time; what belongs to none that is under way is dropped.

    Attributes:
        ended: Is done once nothing more comes; its result says why, and is not an exception.
        died: Whether it was the kernel that ended, not the connection.
        flooded: Whether it ended because one message was larger than any may be.
    """

    def __init__(self, socket: "ClientConnection") -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.died = False
        self.flooded = False
        self._socket = socket
        self._session = secrets.token_hex(16)
        self._asked: dict[str, Asked] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, settings: JupyterSettings, kernel: str, most_bytes: int) -> "Channel":
        """Connect to a kernel.

        Args:
            settings: How the gateway is reached.
            kernel: Which.
            most_bytes: Of one message.

        Raises:
            HostFailure: The gateway does not let us.
            ConfigurationError: The package for WebSockets is missing.
        """
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import WebSocketException
        except ImportError as error:
            raise ConfigurationError(
                f"expected websockets to be installed ({error}); install ropewalk[server]"
            ) from error
        # A name of our own has the gateway keep nothing for us that an earlier connection has missed.
        url = settings.address(f"/api/kernels/{kernel}/channels", socket=True)
        try:
            socket = await connect(
                f"{url}?session_id={secrets.token_hex(8)}",
                additional_headers=settings.headers,
                compression=None,
                proxy=proxy_for(url),
                open_timeout=settings.start_s,  # a gateway answers once the kernel does
                close_timeout=1.0,
                max_size=most_bytes,
                max_queue=MOST_QUEUED,
                logger=_quiet,
            )
        except (WebSocketException, OSError, TimeoutError) as error:
            raise HostFailure(
                f"expected the channels of a kernel at {url}, got {type(error).__name__}: {error}"
            ) from None
        return cls(socket)

    async def ask(
        self, kind: str, content: Message, heard: Callable[[str, Message], None] = lambda *_: None
    ) -> Asked:
        """Send a request.

        Raises:
            HostFailure: The connection is gone.
        """
        name = secrets.token_hex(16)
        header = {
            "msg_id": name,
            "username": "",
            "session": self._session,
            "msg_type": kind,
            "version": VERSION,
            "date": datetime.now(UTC).isoformat(),
        }
        message = {
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
            "channel": "shell",
            "buffers": [],
        }
        asked = Asked(heard)
        self._asked = {name: asked}
        try:
            await self._socket.send(json.dumps(message))
        except OSError as error:
            raise HostFailure(f"expected a kernel to take a request, got: {error}") from None
        except Exception as error:
            if self.ended.done() or _is_closed(error):
                raise HostFailure("expected a kernel to take a request, but its connection is gone") from None
            raise
        return asked

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self._asked = {}
        with suppress(Exception):
            await self._socket.close()
        self._reader.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._reader

    async def _read(self) -> None:
        why = "the connection to the kernel ended"
        try:
            async for frame in self._socket:
                if isinstance(frame, str) and (death := self._hear(frame)):
                    self.died, why = True, death
                    return
            why = self._closing_words()
        except Exception as error:
            why = self._closing_words() if _is_closed(error) else f"{type(error).__name__}: {error}"
        finally:
            if not self.ended.done():
                self.ended.set_result(why)

    def _hear(self, frame: str) -> str | None:
        """Take in a frame; return how the kernel died, where that is what it says."""
        try:
            message = json.loads(frame)
            kind, content = message["header"]["msg_type"], message["content"]
            parent = (message.get("parent_header") or {}).get("msg_id")
            if kind == "status" and content.get("execution_state") in ("restarting", "dead"):
                return f"the kernel's process ended (the gateway says {content['execution_state']!r})"
            asked = self._asked.get(parent) if isinstance(parent, str) else None
            if asked is not None and isinstance(content, dict):
                asked.hear(message, str(kind), content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # whatever it is, no kernel and no gateway writes it: the code got hold of the wire
        return None

    def _closing_words(self) -> str:
        sent = self._socket.protocol.close_sent
        self.flooded = sent is not None and sent.code == TOO_LARGE
        if self.flooded:
            return "the kernel sent a message that is larger than any may be"
        code, reason = self._socket.close_code, self._socket.close_reason
        return f"the connection to the kernel ended ({code}{f': {reason}' if reason else ''})"


def _is_closed(error: Exception) -> bool:
    from websockets.exceptions import ConnectionClosed

    return isinstance(error, ConnectionClosed)
