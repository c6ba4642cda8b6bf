"""The Jupyter backend: kernels of a kernel gateway or Jupyter server as interpreters. A gateway isolates nothing."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import httpx

from openenv_core.errors import ConfigurationError, installed_with
from openenv_core.protocol.http import is_bearer_token
from openenv_core.proxies import proxy_for
from openenv_core.sandbox import CodeError, Execution, Limits

from .hosted import (
    MAX_REPLY_BYTES,
    HostedBackend,
    HostedInterpreter,
    HostFailureError,
    InsideCall,
    make_http_client,
    require_plain_url,
    send_bounded,
    shorten_body,
)
from .outputs import OutputCollector, make_failed_execution, make_stopped_execution, strip_colours

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

URL: Final = "JUPYTER_GATEWAY_URL"
TOKEN: Final = "JUPYTER_GATEWAY_AUTH_TOKEN"
KERNEL_NAME: Final = "JUPYTER_GATEWAY_KERNEL_NAME"

START_TIMEOUT_S: Final = 60.0
"""How long a kernel may take to start."""

REQUEST_TIMEOUT_S: Final = 10.0
"""How long any other request may take."""

INTERRUPT_ALLOWANCE_S: Final = 0.7
"""Extra time for an interrupt to arrive, beyond the grace period of the limits."""

CLEAN_UP_TIMEOUT_S: Final = 2.0
"""How long a released kernel may take to remove its folder."""

_KERNELS: Final = "/api/kernels"
_MAX_RESPONSE_BYTES: Final = 1 << 20
_MAX_QUEUED: Final = 4
_PROTOCOL_VERSION: Final = "5.3"

_TOO_LARGE: Final = 1009
"""The WebSocket close code that we send for a message above our size limit."""

_RATE_NOTES: Final = ("IOPub data rate exceeded", "IOPub message rate exceeded")
"""Prefixes of the notes by which a gateway reports dropped output."""

logger = logging.getLogger("openenv_core")

# At its lowest level, a connection's log contains the headers and thus the token.
_websocket_logger = logging.getLogger("openenv_core.jupyter")
_websocket_logger.setLevel(logging.WARNING)

_Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JupyterSettings:
    """The address and options of a gateway.

    Attributes:
        url: The base URL, to which `/api/kernels` is appended.
        token: Sent as `Authorization: token`; None if the gateway needs none.
        kernel_name: The kernel spec, which must be a Python one; None for the gateway's default.

    Raises:
        ConfigurationError: A value is invalid.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    kernel_name: str | None = None

    def __post_init__(self) -> None:
        require_plain_url(URL, self.url)
        if self.token is not None and not is_bearer_token(self.token):
            raise ConfigurationError(
                f"expected {TOKEN} to be printable ASCII without spaces, got {len(self.token)} other characters"
            )

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {} if self.token is None else {"Authorization": f"token {self.token}"}

    def address(self, path: str, *, socket: bool = False) -> str:
        """Return the URL of a path, with a WebSocket scheme if `socket` is true."""
        base = self.url.rstrip("/")
        return ("ws" + base.removeprefix("http") if socket else base) + path


def backend_from_environment(environ: Mapping[str, str]) -> "JupyterBackend":
    """Return the backend that JUPYTER_GATEWAY_URL, JUPYTER_GATEWAY_AUTH_TOKEN and JUPYTER_GATEWAY_KERNEL_NAME describe.

    Raises:
        ConfigurationError: No URL is set, or a value is invalid.
    """
    url, token, kernel_name = (environ.get(name, "").strip() for name in (URL, TOKEN, KERNEL_NAME))
    if not url:
        raise ConfigurationError(f"expected {URL} to say where a kernel gateway is, got nothing; set it")
    return JupyterBackend(JupyterSettings(url=url, token=token or None, kernel_name=kernel_name or None))


class _NoRoomError(HostFailureError):
    """The gateway has reached its maximum number of kernels."""


class JupyterBackend(HostedBackend):
    """Runs code in the kernels of a Jupyter kernel gateway, one per session. Requests are never retried.

    A gateway isolates nothing: a session's code can do whatever the gateway's user can, also to the kernels and folders
    of other sessions. Time and output are limited; memory, disk, processes and network are not. Use it for trusted
    code, or with gateways that run each kernel in its own container.
    """

    def __init__(self, settings: JupyterSettings) -> None:
        super().__init__()
        self.settings = settings
        self._http = make_http_client(settings.url, settings.headers)

    async def _connect(self) -> None:
        reply = await self._request("GET", "/api/kernelspecs")
        kernel_specs = reply.get("kernelspecs") if isinstance(reply, dict) else None
        if not isinstance(kernel_specs, dict):
            raise HostFailureError(f"expected {self.settings.url} to list its kernels, got something else")
        name = self.settings.kernel_name
        if name is not None and name not in kernel_specs:
            raise HostFailureError(
                f"expected the gateway to have kernels named {name!r}, it has {', '.join(kernel_specs) or 'none'}"
            )

    def _make_interpreter(self, limits: Limits, packages: tuple[str, ...]) -> "_JupyterInterpreter":
        return _JupyterInterpreter(self, limits, packages)

    async def create(self) -> str:
        """Start a kernel and return its id.

        Raises:
            _NoRoomError: The gateway has reached its maximum number of kernels.
        """
        # With an explicit environment, even an empty one, a kernel does not inherit the gateway's, which has the token.
        body: dict[str, Any] = {"env": {}}
        if self.settings.kernel_name is not None:
            body["name"] = self.settings.kernel_name
        reply = await self._request("POST", _KERNELS, body, START_TIMEOUT_S)
        kernel = reply.get("id") if isinstance(reply, dict) else None
        if not isinstance(kernel, str) or not kernel.replace("-", "").isalnum():
            raise HostFailureError(f"expected {self.settings.url} to name the kernel it started")
        return kernel

    async def interrupt(self, kernel: str) -> None:
        """Interrupt a kernel, as Ctrl-C does."""
        await self._request("POST", f"{_KERNELS}/{kernel}/interrupt")

    async def delete(self, kernel: str) -> None:
        """Delete a kernel, if it exists. The gateway takes seconds to end one that does not respond."""
        await self._request("DELETE", f"{_KERNELS}/{kernel}", limit_s=3 * REQUEST_TIMEOUT_S)

    async def _disconnect(self) -> None:
        await self._http.aclose()

    async def _request(
        self, method: str, path: str, body: Any = None, limit_s: float = REQUEST_TIMEOUT_S
    ) -> Any:
        url = self.settings.address(path)
        request = self._http.build_request(method, url, json=body, timeout=httpx.Timeout(None))
        try:
            async with asyncio.timeout(limit_s):
                response, content = await send_bounded(self._http, request, _MAX_RESPONSE_BYTES)
        except TimeoutError:
            raise HostFailureError(f"expected {method} {url} to be answered within {limit_s:g} s") from None
        except httpx.TransportError as error:
            raise HostFailureError(
                f"expected {method} {url} to be answered, got {type(error).__name__}: {error}"
            ) from None
        if response.status_code == 404 and method == "DELETE":
            return None
        if not response.is_success:
            self._raise_refused(method, url, response.status_code, content)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise HostFailureError(f"expected {method} {url} to be answered with JSON") from None

    def _raise_refused(self, method: str, url: str, status: int, content: bytes) -> None:
        text = f"expected {method} {url} to succeed, got HTTP {status}: {shorten_body(content)}"
        if self.settings.token is not None:
            text = text.replace(self.settings.token, "[token]")
        # The kernel gateway reports its limit as 403, proxies in front of it as 429 or 503.
        raise (_NoRoomError if method == "POST" and status in (403, 429, 503) else HostFailureError)(text)


class _KernelRequest:
    """A pending request. `done` gets the reply's content once the kernel has replied and is idle."""

    def __init__(self, on_message: Callable[[str, _Message], None]) -> None:
        self.done: asyncio.Future[_Message] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._reply: _Message | None = None
        self._is_idle = False

    def handle(self, message: _Message, kind: str, content: _Message) -> None:
        """Process one message that belongs to this request."""
        if kind == "status":
            self._is_idle = self._is_idle or content.get("execution_state") == "idle"
        elif kind.endswith("_reply") and message.get("channel") == "shell":
            self._reply = content
        else:
            self._on_message(kind, content)
        if self._is_idle and self._reply is not None and not self.done.done():
            self.done.set_result(self._reply)


class _Channel:
    """The WebSocket connection to a kernel's channels.

    It handles one request at a time; messages that do not belong to the pending one are dropped.

    Attributes:
        ended: Done once the connection has ended; its result is the reason, never an exception.
        kernel_died: Whether the kernel ended, rather than the connection.
        message_too_large: Whether it ended because a message exceeded the size limit.
    """

    def __init__(self, socket: "ClientConnection") -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.kernel_died = False
        self.message_too_large = False
        self._socket = socket
        self._session = secrets.token_hex(16)
        self._requests: dict[str, _KernelRequest] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, settings: JupyterSettings, kernel: str, max_bytes: int) -> "_Channel":
        """Connect to a kernel; a message above `max_bytes` ends the connection."""
        with installed_with("server", "the package websockets"):
            from websockets.asyncio.client import connect
            from websockets.exceptions import WebSocketException
        # With a new session id, the gateway does not replay messages that an earlier connection missed.
        url = settings.address(f"{_KERNELS}/{kernel}/channels", socket=True)
        try:
            socket = await connect(
                f"{url}?session_id={secrets.token_hex(8)}",
                additional_headers=settings.headers,
                compression=None,
                proxy=proxy_for(url),
                open_timeout=START_TIMEOUT_S,  # a gateway accepts only once the kernel responds
                close_timeout=1.0,
                max_size=max_bytes,
                max_queue=_MAX_QUEUED,
                logger=_websocket_logger,
            )
        except (WebSocketException, OSError, TimeoutError) as error:
            raise HostFailureError(
                f"expected the channels of a kernel at {url}, got {type(error).__name__}: {error}"
            ) from None
        return cls(socket)

    async def request(
        self, kind: str, content: _Message, on_message: Callable[[str, _Message], None] = lambda *_: None
    ) -> _KernelRequest:
        """Send a request; `on_message` is called with each message that the kernel publishes for it."""
        message_id = secrets.token_hex(16)
        header = {
            "msg_id": message_id,
            "username": "",
            "session": self._session,
            "msg_type": kind,
            "version": _PROTOCOL_VERSION,
            "date": datetime.now(UTC).isoformat(),
        }
        envelope = {"parent_header": {}, "metadata": {}, "channel": "shell", "buffers": []}
        request = _KernelRequest(on_message)
        self._requests = {message_id: request}
        try:
            await self._socket.send(json.dumps({"header": header, "content": content, **envelope}))
        except OSError as error:
            raise HostFailureError(f"expected a kernel to take a request, got: {error}") from None
        except Exception as error:
            if self.ended.done() or _is_closed(error):
                raise HostFailureError(
                    "expected a kernel to take a request, its connection is gone"
                ) from None
            raise
        return request

    async def close(self) -> None:
        self._requests = {}
        with suppress(Exception):
            await self._socket.close()
        self._reader.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._reader

    async def _read(self) -> None:
        reason = "the connection to the kernel ended"
        try:
            async for frame in self._socket:
                if isinstance(frame, str) and (death := self._handle_frame(frame)):
                    self.kernel_died, reason = True, death
                    return
            reason = self._read_close_reason()
        except Exception as error:
            reason = self._read_close_reason() if _is_closed(error) else f"{type(error).__name__}: {error}"
        finally:
            if not self.ended.done():
                self.ended.set_result(reason)

    def _handle_frame(self, frame: str) -> str | None:
        """Process a frame; return a description of the kernel's death if that is what it reports."""
        try:
            message = json.loads(frame)
            kind, content = message["header"]["msg_type"], message["content"]
            parent = (message.get("parent_header") or {}).get("msg_id")
            if kind == "status" and content.get("execution_state") in ("restarting", "dead"):
                return f"the kernel's process ended (the gateway says {content['execution_state']!r})"
            request = self._requests.get(parent) if isinstance(parent, str) else None
            if request is not None and isinstance(content, dict):
                request.handle(message, str(kind), content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # no kernel or gateway sends such a frame: the session's code has written to the connection
        return None

    def _read_close_reason(self) -> str:
        close_sent = self._socket.protocol.close_sent
        self.message_too_large = close_sent is not None and close_sent.code == _TOO_LARGE
        if self.message_too_large:
            return "the kernel sent a message that is larger than any may be"
        code, reason = self._socket.close_code, self._socket.close_reason
        return f"the connection to the kernel ended ({code}{f': {reason}' if reason else ''})"


def _is_closed(error: Exception) -> bool:
    from websockets.exceptions import ConnectionClosed

    return isinstance(error, ConnectionClosed)


class _JupyterInterpreter(HostedInterpreter):
    """One kernel with its own folder; it shares everything else with the gateway and the other kernels."""

    def __init__(self, gateway: JupyterBackend, limits: Limits, packages: tuple[str, ...]) -> None:
        self._settings = gateway.settings
        super().__init__(limits, packages, isolation="remote", report_files=True)
        self._gateway = gateway
        self._kernel: str | None = None
        self._channel: _Channel | None = None
        self._deletions: set[asyncio.Task[None]] = set()

    async def _begin(self) -> None:
        await self._release_kernel()
        try:
            await self._create_kernel()
        except _NoRoomError:
            if not self._deletions:
                raise
            await asyncio.wait(self._deletions)  # the previous kernel may still occupy the place
            await self._create_kernel()
        assert self._kernel is not None
        self._channel = await self._connect(self._kernel)
        request = await self._channel.request("kernel_info_request", {})
        if not await self._wait(self._channel, request, START_TIMEOUT_S):
            raise HostFailureError(f"expected a kernel to answer within {START_TIMEOUT_S:g} s")
        await self._enter(own_folder=True)

    async def _end(self) -> None:
        if self._root and not self._lock.locked() and self._get_live_channel() is not None:
            # Remove the folder, the only thing that a kernel leaves behind. A busy or dead kernel cannot remove it.
            with suppress(HostFailureError, TimeoutError):
                await self._call_inside(InsideCall("end", root=self._root), CLEAN_UP_TIMEOUT_S)
        self._root = ""
        await self._release_kernel()
        if self._deletions:
            await asyncio.wait(self._deletions)

    async def _run(
        self, code: str, collector: OutputCollector, timeout_s: float, stdin: str | None
    ) -> Execution:
        execution = await self._execute(code, collector, timeout_s, stdin)
        if execution.state_lost:
            await self._release_kernel()  # at once, because it may still be busy
        return execution

    async def _execute(
        self, code: str, collector: OutputCollector, timeout_s: float, stdin: str | None
    ) -> Execution:
        channel = self._require_channel()
        await self._set_stdin(stdin, timeout_s)
        request = await channel.request(
            "execute_request", _execute_request(code), _make_message_handler(collector)
        )
        done = await self._wait(channel, request, timeout_s, collector.flood)
        if done and not collector.flood.done():
            return _to_execution(request.done.result(), collector)
        if channel.ended.done():
            return await self._explain_end(channel)
        state_kept = await self._interrupt(channel, request)
        consequence = (
            "it was interrupted" if state_kept else "it did not heed the interrupt, and its kernel was ended"
        )
        if collector.flood.done():
            reason = f"it wrote more than {self._limits.output_hard_bytes} bytes; {consequence}"
            return make_stopped_execution("output_limit", reason, state_lost=not state_kept)
        return make_stopped_execution(
            "timeout", f"it took longer than {timeout_s:g} s; {consequence}", state_lost=not state_kept
        )

    async def _call_inside(self, call: InsideCall, timeout_s: float) -> str:
        # The answer is returned as a value in the reply, because a gateway may drop published output.
        channel = self._require_channel()
        content = _execute_request("", silent=True, expressions={"answer": call.expression})
        request = await channel.request("execute_request", content)
        done = await self._wait(channel, request, timeout_s)
        if channel.ended.done():
            raise HostFailureError(channel.ended.result(), state_lost=True)
        if not done:
            lost = not await self._interrupt(channel, request)
            raise HostFailureError(f"expected the kernel's files within {timeout_s:g} s", state_lost=lost)
        return _read_expression_value(request.done.result())

    async def _wait(
        self,
        channel: _Channel,
        request: _KernelRequest,
        timeout_s: float,
        *other_futures: asyncio.Future[Any],
    ) -> bool:
        """Wait until the request, the connection or another future is done, or until the timeout.

        Returns:
            Whether the request is done.
        """
        futures: set[asyncio.Future[Any]] = {request.done, channel.ended, *other_futures}
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return request.done.done()

    async def _interrupt(self, channel: _Channel, request: _KernelRequest) -> bool:
        """Interrupt the kernel; return whether it responds, so that its state is kept."""
        if self._kernel is None:
            return False
        try:
            await self._gateway.interrupt(self._kernel)
        except HostFailureError as failure:  # the gateway may be at fault for the timeout
            raise HostFailureError(f"{failure}; the code took too long", state_lost=True) from failure
        return await self._wait(channel, request, self._limits.grace_s + INTERRUPT_ALLOWANCE_S)

    async def _explain_end(self, channel: _Channel) -> Execution:
        """Return how code ended whose channel ended while it ran."""
        ending = channel.ended.result()
        if channel.kernel_died:
            return make_stopped_execution("killed", f"{ending} while the code ran", state_lost=True)
        if channel.message_too_large:
            state_kept = await self._reconnect(channel)
            consequence = "it was interrupted" if state_kept else "its kernel was ended"
            reason = f"it wrote more than {self._limits.output_hard_bytes} bytes at once; {consequence}"
            return make_stopped_execution("output_limit", reason, state_lost=not state_kept)
        reason = f"{ending} while the code ran, and nobody knows how far it got"
        return make_stopped_execution("sandbox_error", reason, state_lost=True)

    async def _reconnect(self, old_channel: _Channel) -> bool:
        """Interrupt a kernel whose connection we closed, and reconnect; return whether it responds."""
        if self._kernel is None:
            return False
        try:
            await self._gateway.interrupt(self._kernel)
            await old_channel.close()
            self._channel = channel = await self._connect(self._kernel)
            request = await channel.request("kernel_info_request", {})
        except HostFailureError:
            return False
        return await self._wait(channel, request, self._limits.grace_s + INTERRUPT_ALLOWANCE_S)

    def _require_channel(self) -> _Channel:
        channel = self._get_live_channel()
        if channel is None:
            reason = "there is no kernel" if self._channel is None else self._channel.ended.result()
            raise HostFailureError(f"{reason} before the code ran", state_lost=True)
        return channel

    def _get_live_channel(self) -> _Channel | None:
        return self._channel if self._channel is not None and not self._channel.ended.done() else None

    async def _connect(self, kernel: str) -> _Channel:
        limits = self._limits
        max_bytes = max(2 * (limits.output_hard_bytes + limits.outputs_bytes), 2 * MAX_REPLY_BYTES)
        return await _Channel.open(self._settings, kernel, max_bytes)

    async def _create_kernel(self) -> None:
        """Start a kernel. If this is cancelled, the gateway starts it all the same, and then it is deleted."""
        creation = asyncio.create_task(self._gateway.create())
        try:
            self._kernel = await asyncio.shield(creation)
        except asyncio.CancelledError:
            self._delete_later(creation)
            raise

    async def _release_kernel(self) -> None:
        """Close the channel, and delete the kernel in the background: an unresponsive one takes the gateway seconds."""
        channel, self._channel = self._channel, None
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            self._delete_later(kernel)
        if channel is not None:
            await channel.close()

    def _delete_later(self, kernel: "str | asyncio.Task[str]") -> None:
        task = asyncio.create_task(self._delete(kernel))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def _delete(self, kernel: "str | asyncio.Task[str]") -> None:
        try:
            await self._gateway.delete(kernel if isinstance(kernel, str) else await kernel)
        except HostFailureError as failure:
            logger.warning("a kernel is left to its gateway: %s", failure)


def _execute_request(
    code: str, *, silent: bool = False, expressions: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "code": code,
        "silent": silent,
        "store_history": not silent,
        "user_expressions": expressions or {},
        "allow_stdin": False,
        "stop_on_error": True,
    }


def _make_message_handler(collector: OutputCollector) -> Callable[[str, _Message], None]:
    """Return a handler that passes a kernel's messages to a collector."""

    def on_message(kind: str, content: _Message) -> None:
        if kind == "stream":
            text = str(content.get("text", ""))
            if content.get("name") == "stderr" and text.startswith(_RATE_NOTES):
                collector.note_loss("stdout", "stderr", "outputs")
            else:
                collector.write(str(content.get("name")), text)
        elif kind in ("display_data", "execute_result") and isinstance(content.get("data"), dict):
            metadata = content.get("metadata")
            collector.show(kind, content["data"], metadata if isinstance(metadata, dict) else {})
        elif kind == "error":
            collector.error = _to_code_error(content)

    return on_message


def _to_execution(reply: _Message, collector: OutputCollector) -> Execution:
    """Return how code ended, from its kernel's reply."""
    if reply.get("status") != "ok":
        return make_failed_execution(collector.error or _to_code_error(reply))
    payload = reply.get("payload")
    if isinstance(payload, list) and any(
        isinstance(each, dict) and each.get("source") == "ask_exit" and not each.get("keepkernel")
        for each in payload
    ):
        return Execution(status="ok", state_lost=True, reason="the code has asked its kernel to end")
    return Execution(status="ok")


def _to_code_error(content: _Message) -> CodeError:
    lines = content.get("traceback")
    texts = [strip_colours(str(line)) for line in lines] if isinstance(lines, list) else []
    return CodeError(
        ename=strip_colours(str(content.get("ename") or "Exception"))[:200],
        evalue=strip_colours(str(content.get("evalue") or "")),
        traceback=tuple(line for text in texts for line in text.split("\n")),
    )


def _read_expression_value(reply: _Message) -> str:
    """Return the `repr` of the value of an `InsideCall` expression; empty if it has none."""
    try:
        text = reply["user_expressions"]["answer"]["data"]["text/plain"]
    except (KeyError, TypeError):
        return ""
    return text if isinstance(text, str) else ""
