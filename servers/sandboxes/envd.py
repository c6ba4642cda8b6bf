"""E2B's envd API inside a sandbox: processes and file system over Connect RPC, files over HTTP."""

import asyncio
import base64
import contextlib
import json
import math
import posixpath
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from openenv_core.sandbox.inside.interpreter import FILE_PIECE
from servers.routes.http import respond
from servers.sandboxes.guest import Guest, GuestError, Subscription
from servers.sandboxes.table import Record

Find: TypeAlias = Callable[[Request], Record]
Json: TypeAlias = dict[str, Any]

STREAMED: Final = frozenset(("/files", "/process.Process/StreamInput"))
"""Paths whose bodies are read here as a stream."""

STREAM: Final = "application/connect+json"
MAX_MESSAGE: Final = 8 << 20
MAX_UPLOAD: Final = 64 << 20
"""Bytes of a form; an upload as application/octet-stream is limited only by the sandbox's disk."""

BODY_SILENCE_TIMEOUT_S: Final = 60.0
KEEPALIVE_S: Final = 50.0
BUSY_RETRY_S: Final = 0.05
END_TIMEOUT_S: Final = 1.0
"""Seconds after its deadline for a command's end, or its kill, to be reported."""
UNREAD_INPUT_TIMEOUT_S: Final = 60.0
"""How long a command may leave streamed input unread; until then a client's disconnection goes unnoticed."""

_KILLED: Final = "signal: killed"
"""The status of a command that SIGKILL has ended."""

_SIGNALS: Final = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}


def routes(find: Find) -> list[Route]:
    """Return the routes of the API.

    Args:
        find: Returns the sandbox that a request is for, or raises.
    """

    def make_unary(path: str, act: "Callable[[Guest, Json], Awaitable[Json]]") -> Route:
        async def endpoint(request: Request) -> Response:
            guest = _guest(find, request)
            body = message_of(await request.body())

            async def answer() -> Response:
                with _fields_required():
                    return JSONResponse(await act(guest, body))

            return await respond(request, answer())

        return Route(path, endpoint, methods=["POST"])

    def make_streaming(path: str, act: "Callable[[Guest, Json, float | None], AsyncIterator[Json]]") -> Route:
        async def endpoint(request: Request) -> Response:
            guest = _guest(find, request)
            body = message_of((await request.body())[5:])
            limit = request.headers.get("connect-timeout-ms", "")
            timeout_s = int(limit) / 1000 if limit.isdigit() and len(limit) <= 10 else None
            return StreamingResponse(_write_envelopes(act(guest, body, timeout_s)), media_type=STREAM)

        return Route(path, endpoint, methods=["POST"])

    async def stream_input(request: Request) -> Response:
        # Not a StreamingResponse: it would read the request's body while listening for the client's disconnection.
        answer = [piece async for piece in _write_envelopes(_take_input(_guest(find, request), request))]
        return Response(b"".join(answer), media_type=STREAM)

    async def files(request: Request) -> Response:
        guest, path = _guest(find, request), request.query_params.get("path", "")
        with _fields_required():
            if request.method == "GET":
                return await _download(guest, path)
            return JSONResponse(await _upload(guest, request, path))

    process, system = "/process.Process/", "/filesystem.Filesystem/"
    return [
        make_streaming(process + "Start", _start),
        make_streaming(process + "Connect", _connect),
        make_unary(process + "List", _list_processes),
        make_unary(process + "SendInput", lambda guest, body: _input(guest, _pid(body), body["input"])),
        make_unary(process + "SendSignal", _signal),
        make_unary(process + "CloseStdin", lambda guest, body: _plain(guest, "close_stdin", pid=_pid(body))),
        Route(process + "StreamInput", stream_input, methods=["POST"]),
        make_unary(system + "Stat", lambda guest, body: _plain(guest, "stat", path=body["path"])),
        make_unary(system + "MakeDir", lambda guest, body: _plain(guest, "mkdir", path=body["path"])),
        make_unary(system + "Remove", lambda guest, body: _plain(guest, "remove", path=body["path"])),
        make_unary(system + "Move", _move),
        make_unary(system + "ListDir", _list_folder),
        make_streaming(system + "WatchDir", _watch_folder),
        make_unary(system + "CreateWatcher", _create_watcher),
        make_unary(system + "GetWatcherEvents", _watcher_events),
        make_unary(
            system + "RemoveWatcher", lambda guest, body: _plain(guest, "unwatch", name=body["watcherId"])
        ),
        Route("/files", files, methods=["GET", "POST"]),
    ]


def _guest(find: Find, request: Request) -> Guest:
    """Return the agent of a request's sandbox; GuestError if the request names a user other than the sandbox's."""
    guest = find(request).guest
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    user = request.query_params.get("username")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            user = base64.b64decode(credentials).decode().partition(":")[0]
    if user not in (None, "", "user", guest.user):
        raise GuestError("unauthenticated", f"expected the sandbox's user {guest.user!r}, got {user!r}")
    return guest


@contextlib.contextmanager
def _fields_required() -> Iterator[None]:
    """Turn the exceptions of a missing or mistyped field into a GuestError."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise GuestError("invalid_argument", f"expected a request of E2B's, got {error!r}") from None


def message_of(data: bytes) -> Json:
    """Return a body's JSON object, {} for an empty body; GuestError if it is anything else."""
    try:
        message = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise GuestError("invalid_argument", "the body is no JSON object")
    return message


async def _write_envelopes(messages: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    """Yield messages as Connect RPC envelopes, then the end of the stream with its error, if any."""

    def envelope(flags: int, message: Json) -> bytes:
        data = json.dumps(message, separators=(",", ":")).encode()
        return bytes([flags]) + len(data).to_bytes(4, "big") + data

    end: Json = {}
    try:
        with _fields_required():
            async for message in messages:
                yield envelope(0, message)
    except GuestError as error:
        end = {"error": {"code": error.code, "message": str(error)}}
    yield envelope(2, end)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the pieces of a body; GuestError if none arrives for BODY_SILENCE_TIMEOUT_S."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_SILENCE_TIMEOUT_S):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except (TimeoutError, ClientDisconnect):
            raise GuestError("deadline_exceeded", "the rest of the body did not come in time") from None
        yield piece  # out of the time limit, which is not for what the caller does with it


async def _plain(guest: Guest, op: str, **fields: Any) -> Json:
    header, _ = await guest.ask(op, **fields)
    return {"entry": header["entry"]} if "entry" in header else {}


async def _listing(guest: Guest, op: str, **fields: Any) -> Any:
    _, data = await guest.ask(op, **fields)
    if len(data) > MAX_MESSAGE:  # parsing a larger one would block the event loop
        raise GuestError("resource_exhausted", f"the list is longer than {MAX_MESSAGE} bytes")
    return json.loads(data)


# Processes


def _pid(body: Json) -> int:
    selector = body["process"]
    if type(pid := selector.get("pid")) is not int:
        raise GuestError("invalid_argument", "the request names no process by its pid")
    return pid


async def _input(guest: Guest, pid: int, given: Json, timeout_s: float = math.inf) -> Json:
    if "stdin" not in given:
        raise GuestError("unimplemented", "expected input for standard input; there are no terminals here")
    blob = base64.b64decode(given["stdin"])
    clock = asyncio.get_running_loop().time
    for at in range(0, len(blob), FILE_PIECE):
        deadline = clock() + timeout_s
        while True:
            try:
                await guest.ask("input", blob[at : at + FILE_PIECE], pid=pid)
                break
            except GuestError as error:
                # The command reads slowly: retry until the client's own timeout or disconnection ends the request.
                if error.code != "resource_exhausted" or clock() > deadline:
                    raise
            await asyncio.sleep(BUSY_RETRY_S)
    return {}


async def _take_input(guest: Guest, request: Request) -> AsyncIterator[Json]:
    pid: Any = None
    buffer = bytearray()
    async for piece in _pieces(request):
        buffer += piece
        while len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
            message = message_of(bytes(buffer[5 : 5 + size]))
            del buffer[: 5 + size]
            event = message.get("event", message)
            if "start" in event:
                pid = _pid(event["start"])
            elif "data" in event:
                await _input(guest, pid, event["data"]["input"], UNREAD_INPUT_TIMEOUT_S)
        if len(buffer) > MAX_MESSAGE:
            raise GuestError("resource_exhausted", f"a message is longer than {MAX_MESSAGE} bytes")
    if buffer:
        raise GuestError("invalid_argument", "the last message ends too early; send it whole")
    yield {}


async def _signal(guest: Guest, body: Json) -> Json:
    return await _plain(guest, "signal", pid=_pid(body), signal=_SIGNALS[body["signal"]])


async def _list_processes(guest: Guest, _: Json) -> Json:
    rows = [
        {"pid": each["pid"], "config": {name: each[name] for name in ("cmd", "args", "envs", "cwd")}}
        for each in await _listing(guest, "commands")
    ]
    return {"processes": rows}


async def _start(guest: Guest, body: Json, timeout_s: float | None) -> AsyncIterator[Json]:
    """Start a command and stream its events. It outlives a disconnection, but not its timeout."""
    config = body["process"]
    if "pty" in body:
        raise GuestError("unimplemented", "terminals are not supported; start the command without one")
    async with guest.subscribed(f"p{guest.name()}") as output:
        killed = False

        def kill() -> None:
            nonlocal killed
            killed = True
            del guest.deadlines[output.stream]
            guest.notify("signal", stream=output.stream, signal=9)

        # Before the start, during which the client may leave.
        if timeout_s is not None:
            guest.deadlines[output.stream] = asyncio.get_running_loop().call_later(timeout_s, kill)
        header, _ = await guest.ask(
            "start",
            stream=output.stream,
            cmd=config["cmd"],
            args=config.get("args", []),
            envs=config.get("envs", {}),
            cwd=config.get("cwd") or "",
            stdin=bool(body.get("stdin")),
        )
        async for event in _process_events(int(header["pid"]), output, timeout_s, END_TIMEOUT_S):
            # It may have ended otherwise, just before the signal.
            if killed and event["event"].get("end", {}).get("status") == _KILLED:
                raise _timeout_error(timeout_s)
            yield event


async def _connect(guest: Guest, body: Json, timeout_s: float | None) -> AsyncIterator[Json]:
    pid = _pid(body)
    header, _ = await guest.ask("find", pid=pid)
    async with guest.subscribed(str(header["name"])) as output:
        await guest.ask("find", pid=pid)  # it may have ended before the subscription
        async for event in _process_events(pid, output, timeout_s):
            yield event


async def read_messages(
    output: Subscription, timeout_s: float | None, late_s: float = 0.0
) -> AsyncIterator[tuple[Json, bytes] | None]:
    """Yield a stream's messages until its end; None when a keep-alive is due.

    Args:
        output: The stream.
        timeout_s: Seconds for the stream to end.
        late_s: Further seconds to wait for the report of an end.

    Raises:
        GuestError: The stream did not end in time, or its sandbox is gone.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s + late_s
    while True:
        left_s = KEEPALIVE_S if deadline is None else min(KEEPALIVE_S, deadline - loop.time())
        message = await output.take(max(left_s, 0.0))
        if message is None and deadline is not None and loop.time() >= deadline:
            raise _timeout_error(timeout_s)
        if message is not None and message[0].get("lost"):
            raise GuestError("unavailable", str(message[0].get("status")))
        yield message
        if message is not None and "end" in message[0]:
            return


def _timeout_error(timeout_s: float | None) -> GuestError:
    return GuestError("deadline_exceeded", f"it did not end within {timeout_s:g} s")


async def _process_events(
    pid: int, output: Subscription, timeout_s: float | None, late_s: float = 0.0
) -> AsyncIterator[Json]:
    yield {"event": {"start": {"pid": pid}}}
    async for message in read_messages(output, timeout_s, late_s):
        event: Json = {"keepalive": {}}
        if message is not None and "end" in message[0]:
            code, status = int(message[0]["end"]), str(message[0]["status"])
            error = {"error": status} if code else {}
            event = {"end": {"exitCode": code, "exited": code >= 0, "status": status, **error}}
        elif message is not None:
            event = {"data": {str(message[0]["pipe"]): base64.b64encode(message[1]).decode()}}
        yield {"event": event}


# The file system


async def _list_folder(guest: Guest, body: Json) -> Json:
    depth = int(body.get("depth") or 1)
    return {"entries": await _listing(guest, "list", path=body.get("path", ""), depth=depth)}


async def _move(guest: Guest, body: Json) -> Json:
    return await _plain(guest, "move", source=body["source"], destination=body["destination"])


async def _watch(guest: Guest, body: Json, name: str, *, held: bool) -> None:
    recursive = bool(body.get("recursive"))
    await guest.ask("watch", name=name, path=body["path"], recursive=recursive, held=held)


def _events(changes: Any) -> list[Json]:
    return [{"type": f"EVENT_TYPE_{kind}", "name": str(name)} for kind, name in changes]


async def _watch_folder(guest: Guest, body: Json, timeout_s: float | None) -> AsyncIterator[Json]:
    async with guest.subscribed(f"w{guest.name()}") as output:
        try:
            await _watch(guest, body, output.stream, held=False)
            yield {"start": {}}
            async for message in read_messages(output, timeout_s):
                if message is None:
                    yield {"keepalive": {}}
                elif "end" in message[0]:
                    raise GuestError("not_found", str(message[0].get("status")))
                else:
                    for event in _events(message[0].get("events", ())):
                        yield {"filesystem": event}
        finally:
            guest.notify("unwatch", name=output.stream)


async def _create_watcher(guest: Guest, body: Json) -> Json:
    name = f"w{guest.name()}"
    await _watch(guest, body, name, held=True)
    return {"watcherId": name}


async def _watcher_events(guest: Guest, body: Json) -> Json:
    return {"events": _events(await _listing(guest, "events", name=body["watcherId"]))}


# Files


async def _download(guest: Guest, path: str) -> Response:
    first = (await guest.ask("read", path=path, offset=0))[1]

    async def rest() -> AsyncIterator[bytes]:
        offset, data = 0, first
        while data:
            yield data
            offset += len(data)
            if len(data) < FILE_PIECE:
                return
            data = (await guest.ask("read", path=path, offset=offset))[1]

    name = quote(posixpath.basename(path), safe="")
    return StreamingResponse(
        rest(),
        media_type="application/octet-stream",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "X-Content-Type-Options": "nosniff",
        },
    )


async def _upload(guest: Guest, request: Request, path: str) -> list[Json]:
    kind = request.headers.get("content-type", "")
    pieces = _decompress(request)
    if kind.startswith("application/octet-stream"):
        if not path:
            raise GuestError("invalid_argument", "the query has no path")
        return [await _write(guest, path, pieces)]
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > MAX_UPLOAD:
            raise GuestError("resource_exhausted", f"the form is larger than {MAX_UPLOAD} bytes")
    entries = []
    for name, data in _form_files(kind, bytes(body)):

        async def whole(data: bytes = data) -> AsyncIterator[bytes]:
            yield data

        entries.append(await _write(guest, path or name, whole()))
    return entries


async def _write(guest: Guest, path: str, pieces: AsyncIterator[bytes]) -> Json:
    offset, buffer = 0, bytearray()
    entry: Json = {}
    async for piece in pieces:
        guest.require()  # so that a slow upload fails at once, and does not delay the service's shutdown
        buffer += piece
        while len(buffer) >= FILE_PIECE:
            entry = (await guest.ask("write", bytes(buffer[:FILE_PIECE]), path=path, offset=offset))[0]
            offset += FILE_PIECE
            del buffer[:FILE_PIECE]
    if buffer or not offset:
        entry = (await guest.ask("write", bytes(buffer), path=path, offset=offset))[0]
    info: Json = entry["entry"]
    return info


async def _decompress(request: Request) -> AsyncIterator[bytes]:
    """Yield the body, decompressed if it is gzip, in pieces of bounded size."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise GuestError("invalid_argument", f"expected a body as it is, or gzip, got {encoding!r}")
    if encoding == "identity":
        async for piece in _pieces(request):
            yield piece
        return
    unpacker = zlib.decompressobj(wbits=31)
    try:
        async for piece in _pieces(request):
            while piece:
                if unpacker.eof:  # RFC 1952: a file has one member or more
                    unpacker = zlib.decompressobj(wbits=31)
                yield unpacker.decompress(piece, FILE_PIECE)
                piece = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        yield unpacker.flush()
    except zlib.error as error:
        raise GuestError("invalid_argument", f"expected a body of gzip, got: {error}") from None
    if not unpacker.eof:
        raise GuestError("invalid_argument", "the body of gzip ends too early; send it whole")


_BOUNDARY: Final = re.compile(r'multipart/form-data;.*\bboundary="?([^";,]+)"?', re.IGNORECASE)
_FILENAME: Final = re.compile(rb'\bfilename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def _form_files(kind: str, body: bytes) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files in a form."""
    match = _BOUNDARY.match(kind)
    if match is None:
        raise GuestError(
            "invalid_argument", "expected multipart/form-data or application/octet-stream, got neither"
        )
    files = []
    *sections, end = (b"\r\n" + body).split(b"\r\n--" + match[1].encode())
    if not end.startswith(b"--"):
        raise GuestError(
            "invalid_argument", "the form ends too early, without its last boundary; send it whole"
        )
    for section in sections[1:]:
        head, _, data = section.partition(b"\r\n\r\n")
        if (named := _FILENAME.search(head)) is None:
            raise GuestError("invalid_argument", "a file in the form has no name")
        # Undo the escapes of browsers and httpx.
        name = (
            named[1].decode("utf-8", "replace").replace("%22", '"').replace('\\"', '"').replace("\\\\", "\\")
        )
        files.append((name, data))
    if not files:
        raise GuestError("invalid_argument", "the form has no file")
    return files
