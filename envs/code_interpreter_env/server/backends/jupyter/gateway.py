"""Jupyter's interfaces: kernels over REST, and one kernel's messages over a WebSocket."""

import asyncio
import json
import logging
import secrets
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import httpx

from openenv_core.errors import ConfigurationError
from openenv_core.proxies import proxy_for

from ..hosted import HostFailureError
from .settings import JupyterSettings

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

KERNELS: Final = "/api/kernels"
MOST_BYTES: Final = 1 << 20
MOST_WORDS: Final = 300


class NoRoomError(HostFailureError):
    """The gateway has as many kernels as it may have."""


class Gateway:
    """The gateway, asked by coroutines of one loop. Nothing is sent twice.

    Args:
        settings: How it is reached.

    Raises:
        ConfigurationError: The proxy of the environment cannot be used.
    """

    def __init__(self, settings: JupyterSettings) -> None:
        self._settings = settings
        transport = httpx.AsyncHTTPTransport(
            verify=_trust() if settings.url.startswith("https://") else False, proxy=proxy_for(settings.url)
        )
        self._http = httpx.AsyncClient(
            transport=transport,
            headers={"Accept-Encoding": "identity"} | settings.headers,
            follow_redirects=False,  # it may lead to somebody who must not get the token
            trust_env=False,
        )

    async def check(self) -> None:
        """See that there is a gateway that lets us in and has kernels of the name.

        Raises:
            HostFailureError: There is none, or it has not.
        """
        said = await self._asked("GET", "/api/kernelspecs")
        known = said.get("kernelspecs") if isinstance(said, dict) else None
        if not isinstance(known, dict):
            raise HostFailureError(f"expected {self._settings.url} to list its kernels, got something else")
        name = self._settings.kernel_name
        if name is not None and name not in known:
            raise HostFailureError(
                f"expected the gateway to have kernels named {name!r}, it has {', '.join(known) or 'none'}"
            )

    async def create(self) -> str:
        """Start a kernel, and return its id.

        Raises:
            NoRoomError: The gateway has as many as it may have.
            HostFailureError: It did not start one.
        """
        # With an environment of its own, if an empty one, a kernel does not inherit the gateway's, token and all.
        body: dict[str, Any] = {"env": {}}
        if self._settings.kernel_name is not None:
            body["name"] = self._settings.kernel_name
        said = await self._asked("POST", KERNELS, body, self._settings.start_s)
        kernel = said.get("id") if isinstance(said, dict) else None
        if not isinstance(kernel, str) or not kernel.replace("-", "").isalnum():
            raise HostFailureError(
                f"expected {self._settings.url} to name the kernel it started, got something else"
            )
        return kernel

    async def interrupt(self, kernel: str) -> None:
        """Have a kernel stop what it does, as Ctrl-C would.

        Raises:
            HostFailureError: The gateway did not do it.
        """
        await self._asked("POST", f"{KERNELS}/{kernel}/interrupt")

    async def delete(self, kernel: str) -> None:
        """End a kernel; one that is gone is as good. One that does not listen takes the gateway seconds.

        Raises:
            HostFailureError: The gateway did not do it.
        """
        await self._asked("DELETE", f"{KERNELS}/{kernel}", limit_s=3 * self._settings.request_s)

    async def close(self) -> None:
        """Let the connections go."""
        await self._http.aclose()

    async def _asked(self, method: str, path: str, body: Any = None, limit_s: float | None = None) -> Any:
        url = self._settings.address(path)
        limit_s = self._settings.request_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                status, content = await self._sent(method, url, body)
        except TimeoutError:
            raise HostFailureError(f"expected {method} {url} to be answered within {limit_s:g} s") from None
        except httpx.TransportError as error:
            raise HostFailureError(
                f"expected {method} {url} to be answered, got {type(error).__name__}: {error}"
            ) from None
        if status == 404 and method == "DELETE":
            return None
        if status >= 300:
            self._refuse(method, url, status, content)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise HostFailureError(
                f"expected {method} {url} to be answered with JSON, got something else"
            ) from None

    async def _sent(self, method: str, url: str, body: Any) -> tuple[int, bytes]:
        request = self._http.build_request(method, url, json=body, timeout=httpx.Timeout(None))
        response = await self._http.send(request, stream=True)
        try:
            content = bytearray()
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > MOST_BYTES:
                    raise HostFailureError(
                        f"expected {method} {url} to be answered with less than {MOST_BYTES} bytes"
                    )
            return response.status_code, bytes(content)
        finally:
            await response.aclose()

    def _refuse(self, method: str, url: str, status: int, content: bytes) -> None:
        words = " ".join(content[: 4 * MOST_WORDS].decode("utf-8", "replace").split())[:MOST_WORDS]
        if self._settings.token is not None:
            words = words.replace(self._settings.token, "[token]")
        text = f"expected {method} {url} to succeed, got HTTP {status}: {words or '(nothing)'}"
        # 403 is the kernel gateway's word for its limit, 429 and 503 are those of others in front of it.
        if method == "POST" and status in (403, 429, 503):
            raise NoRoomError(text)
        raise HostFailureError(text)


@cache
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()


Message: TypeAlias = Mapping[str, Any]

VERSION: Final = "5.3"
MOST_QUEUED: Final = 4

TOO_LARGE: Final = 1009
"""Our own code for hanging up on a message that is larger than we take."""

_quiet = logging.getLogger("openenv_core.jupyter")
_quiet.setLevel(logging.WARNING)
"""A connection's own log has its headers, token and all, in its lowest level."""


class KernelRequest:
    """A request on its way.

    Args:
        on_message: Called with each message that the kernel publishes because of it.

    Attributes:
        done: Has the reply's content once there is a reply and all was published.
    """

    def __init__(self, on_message: Callable[[str, Message], None]) -> None:
        self.done: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.on_message = on_message
        self._reply: Message | None = None
        self._idle = False

    def hear(self, message: Message, kind: str, content: Message) -> None:
        """Take in one message."""
        if kind == "status":
            self._idle = self._idle or content.get("execution_state") == "idle"
        elif kind.endswith("_reply") and message.get("channel") == "shell":
            self._reply = content
        else:
            self.on_message(kind, content)
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
        self._asked: dict[str, KernelRequest] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, settings: JupyterSettings, kernel: str, most_bytes: int) -> "Channel":
        """Connect to a kernel.

        Args:
            settings: How the gateway is reached.
            kernel: Which.
            most_bytes: Of one message.

        Raises:
            HostFailureError: The gateway does not let us.
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
            raise HostFailureError(
                f"expected the channels of a kernel at {url}, got {type(error).__name__}: {error}"
            ) from None
        return cls(socket)

    async def ask(
        self, kind: str, content: Message, on_message: Callable[[str, Message], None] = lambda *_: None
    ) -> KernelRequest:
        """Send a request.

        Raises:
            HostFailureError: The connection is gone.
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
        asked = KernelRequest(on_message)
        self._asked = {name: asked}
        try:
            await self._socket.send(json.dumps(message))
        except OSError as error:
            raise HostFailureError(f"expected a kernel to take a request, got: {error}") from None
        except Exception as error:
            if self.ended.done() or _is_closed(error):
                raise HostFailureError(
                    "expected a kernel to take a request, but its connection is gone"
                ) from None
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
