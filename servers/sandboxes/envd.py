"""What E2B's clients ask inside of a sandbox: processes and file system over Connect RPC, files over HTTP."""

import asyncio
import base64
import contextlib
import json
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from openenv_core.sandbox.inside.interpreter import FILE_PIECE
from servers.sandboxes.guest import Guest, GuestError, Subscription
from servers.sandboxes.table import Record

Find: TypeAlias = Callable[[Request], Record]
Json: TypeAlias = dict[str, Any]

STREAMED: Final = frozenset(("/files", "/process.Process/StreamInput"))
"""Paths whose bodies are read here, as they come."""

MAX_MESSAGE: Final = 8 << 20
MAX_UPLOAD: Final = 64 << 20
"""Of a form; what comes as it is has no bound but the sandbox's own."""

BODY_SILENCE_TIMEOUT_S: Final = 60.0
KEEPALIVE_S: Final = 50.0
BUSY_RETRY_S: Final = 0.05

STATUSES: Final = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 429,
    "unimplemented": 501,
    "unavailable": 502,
    "deadline_exceeded": 504,
}
_SIGNALS: Final = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}


def unpadded(data: bytes) -> bytes:
    """Return base64 as E2B's signatures have it."""
    return base64.b64encode(data).rstrip(b"=")


async def refused(request: Request, error: Exception) -> Response:
    """Answer with an error, as Connect RPC and E2B's HTTP routes have them."""
    assert isinstance(error, GuestError)
    status = STATUSES.get(error.code, 500)
    if request.url.path == "/files":
        status = {429: 507, 403: 400}.get(status, status)
    code: str | int = status if error.code == "unavailable" else error.code
    return JSONResponse({"code": code, "message": str(error)}, status)


def routes(find: Find) -> list[Route]:
    """Return the routes.

    Args:
        find: Returns the sandbox that a request is for, or raises.
    """

    def unary(path: str, act: "Callable[[Record, Json], Awaitable[Json]]") -> Route:
        async def endpoint(request: Request) -> Response:
            record = _of_user(find(request), request)
            body = _message(await request.body())
            try:
                return JSONResponse(await act(record, body))
            except (KeyError, TypeError, ValueError) as error:
                raise GuestError("invalid_argument", f"expected a request of E2B's, got {error!r}") from None

        return Route(path, endpoint, methods=["POST"])

    def streaming(path: str, act: "Callable[[Record, Json, float | None], AsyncIterator[Json]]") -> Route:
        async def endpoint(request: Request) -> Response:
            record = _of_user(find(request), request)
            body = _message((await request.body())[5:])
            limit = request.headers.get("connect-timeout-ms", "")
            timeout_s = int(limit) / 1000 if limit.isdigit() and len(limit) <= 10 else None
            pieces = _enveloped(act(record, body, timeout_s))
            return StreamingResponse(pieces, media_type="application/connect+json")

        return Route(path, endpoint, methods=["POST"])

    async def stream_input(request: Request) -> Response:
        record = find(request)
        message: Json = {}
        try:
            pid: Any = None
            async for message in _messages(request):
                if "start" in message:
                    pid = _pid(message["start"])
                elif "data" in message:
                    await _input(record, pid, message["data"]["input"])
            end: Json = {}
        except (KeyError, TypeError, ValueError) as error:
            end = {
                "error": {"code": "invalid_argument", "message": f"expected messages of E2B's, got {error!r}"}
            }
        except GuestError as error:
            end = {"error": {"code": error.code, "message": str(error)}}
        content = (b"" if "error" in end else _envelope(0, {})) + _envelope(2, end)
        return Response(content, media_type="application/connect+json")

    async def files(request: Request) -> Response:
        record = _of_user(find(request), request)
        path = request.query_params.get("path")
        try:
            if request.method == "GET":
                return await _download(record.guest, path or "")
            return JSONResponse(await _upload(record.guest, request, path))
        except (KeyError, TypeError) as error:  # somebody has forged the agent's answer
            raise GuestError(
                "internal", f"expected an answer of the sandbox's agent, got {error!r}"
            ) from None

    process, system = "/process.Process/", "/filesystem.Filesystem/"
    return [
        streaming(process + "Start", _start),
        streaming(process + "Connect", _connect),
        unary(process + "List", _list_processes),
        unary(process + "SendInput", lambda record, body: _input(record, _pid(body), body["input"])),
        unary(process + "SendSignal", _signal),
        unary(process + "CloseStdin", lambda record, body: _plain(record, "close_stdin", pid=_pid(body))),
        Route(process + "StreamInput", stream_input, methods=["POST"]),
        unary(system + "Stat", lambda record, body: _plain(record, "stat", path=body["path"])),
        unary(system + "MakeDir", lambda record, body: _plain(record, "mkdir", path=body["path"])),
        unary(system + "Remove", lambda record, body: _plain(record, "remove", path=body["path"])),
        unary(system + "Move", _move),
        unary(system + "ListDir", _list_folder),
        streaming(system + "WatchDir", _watch_folder),
        unary(system + "CreateWatcher", _create_watcher),
        unary(system + "GetWatcherEvents", _watcher_events),
        unary(system + "RemoveWatcher", _remove_watcher),
        Route("/files", files, methods=["GET", "POST"]),
    ]


def _of_user(record: Record, request: Request) -> Record:
    """Check the user that the caller names: there is one in a sandbox."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    user = request.query_params.get("username")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            user = base64.b64decode(given).decode().partition(":")[0]
    if user not in (None, "", "user", record.guest.user):
        raise GuestError(
            "unauthenticated", f"expected the sandbox's user {record.guest.user!r}, got {user!r}"
        )
    return record


def _message(data: bytes) -> Json:
    try:
        message = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise GuestError("invalid_argument", "expected a JSON object, got none")
    return message


def _envelope(flags: int, message: Json) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


async def _enveloped(messages: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    end: Json = {}
    try:
        async for message in messages:
            yield _envelope(0, message)
    except GuestError as error:
        end = {"error": {"code": error.code, "message": str(error)}}
    except (KeyError, TypeError, ValueError) as error:
        end = {
            "error": {"code": "invalid_argument", "message": f"expected a request of E2B's, got {error!r}"}
        }
    yield _envelope(2, end)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield a body as it comes; whoever falls silent is not waited for."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_SILENCE_TIMEOUT_S):
                yield await anext(stream)
        except StopAsyncIteration:
            return
        except (TimeoutError, ClientDisconnect):
            raise GuestError("deadline_exceeded", "expected the rest of the body, got nothing") from None


async def _messages(request: Request) -> AsyncIterator[Json]:
    held = bytearray()
    async for piece in _pieces(request):
        held += piece
        while len(held) >= 5 and len(held) >= 5 + (size := int.from_bytes(held[1:5], "big")):
            message = _message(bytes(held[5 : 5 + size]))
            del held[: 5 + size]
            yield message.get("event", message)
        if len(held) > MAX_MESSAGE:
            raise GuestError(
                "resource_exhausted", f"expected messages of at most {MAX_MESSAGE} bytes, got more"
            )


def _pid(body: Json) -> int:
    selector = body["process"]
    if type(pid := selector.get("pid")) is not int:
        raise GuestError("invalid_argument", "expected a process by its pid, got none")
    return pid


async def _plain(record: Record, op: str, **fields: Any) -> Json:
    header, _ = await record.guest.ask(op, **fields)
    return {"entry": header["entry"]} if "entry" in header else {}


async def _input(record: Record, pid: int, given: Json) -> Json:
    if "stdin" not in given:
        raise GuestError("unimplemented", "expected input for standard input; there are no terminals here")
    blob = base64.b64decode(given["stdin"])
    pieces = [blob[at : at + FILE_PIECE] for at in range(0, len(blob), FILE_PIECE)]
    while pieces:
        try:
            await record.guest.ask("input", pieces[0], pid=pid)
            del pieces[0]
        except GuestError as error:
            if error.code != "resource_exhausted":
                raise
            await asyncio.sleep(BUSY_RETRY_S)  # it reads slowly; the client's own time-out bounds this
    return {}


async def _signal(record: Record, body: Json) -> Json:
    return await _plain(record, "signal", pid=_pid(body), signal=_SIGNALS[body["signal"]])


async def _list_processes(record: Record, _: Json) -> Json:
    told = [
        {"pid": each["pid"], "config": {name: each[name] for name in ("cmd", "args", "envs", "cwd")}}
        for each in await _listing(record, "commands")
    ]
    return {"processes": told}


async def _move(record: Record, body: Json) -> Json:
    return await _plain(record, "move", source=body["source"], destination=body["destination"])


async def _list_folder(record: Record, body: Json) -> Json:
    depth = int(body.get("depth") or 1)
    return {"entries": await _listing(record, "list", path=body.get("path", ""), depth=depth)}


async def _listing(record: Record, op: str, **fields: Any) -> Any:
    _, data = await record.guest.ask(op, **fields)
    if len(data) > MAX_MESSAGE:  # to read more of it would keep everybody waiting
        raise GuestError(
            "resource_exhausted", f"expected a list of at most {MAX_MESSAGE} bytes, got a longer one"
        )
    return json.loads(data)


async def _start(record: Record, body: Json, timeout_s: float | None) -> AsyncIterator[Json]:
    """Start a command and tell what becomes of it. It outlives whoever listens, but not its own time."""
    guest, config = record.guest, body["process"]
    if "pty" in body:
        raise GuestError(
            "unimplemented", "expected a command without a terminal, got one with; there is none here"
        )
    async with guest.subscribed(f"p{guest.name()}") as output:
        header, _ = await guest.ask(
            "start",
            stream=output.stream,
            cmd=config["cmd"],
            args=config.get("args", []),
            envs=config.get("envs", {}),
            cwd=config.get("cwd") or "",
            stdin=bool(body.get("stdin")),
        )
        pid = int(header["pid"])
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(timeout_s, lambda: guest.tell("signal", stream=output.stream, signal=9))
        async for event in _process_events(pid, output, timeout_s):
            yield event


async def _connect(record: Record, body: Json, timeout_s: float | None) -> AsyncIterator[Json]:
    guest, pid = record.guest, _pid(body)
    header, _ = await guest.ask("find", pid=pid)
    async with guest.subscribed(str(header["name"])) as output:
        await guest.ask("find", pid=pid)  # it may have ended before anybody listened
        async for event in _process_events(pid, output, timeout_s):
            yield event


async def _coming(output: Subscription, timeout_s: float | None) -> AsyncIterator[tuple[Json, bytes] | None]:
    """Yield what comes of a stream, to its end; None where a client has to hear that we live."""
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s
    while True:
        left_s = KEEPALIVE_S if deadline is None else min(KEEPALIVE_S, deadline - loop.time())
        came = await output.take(max(left_s, 0.0))
        if came is None and deadline is not None and loop.time() >= deadline:
            raise GuestError("deadline_exceeded", f"expected it to end within {timeout_s:g} s, got no end")
        if came is not None and came[0].get("lost"):
            raise GuestError("unavailable", str(came[0].get("status")))
        yield came
        if came is not None and "end" in came[0]:
            return


async def _process_events(pid: int, output: Subscription, timeout_s: float | None) -> AsyncIterator[Json]:
    yield {"event": {"start": {"pid": pid}}}
    async for came in _coming(output, timeout_s):
        event: Json = {"keepalive": {}}
        if came is not None and "end" in came[0]:
            code, status = int(came[0]["end"]), str(came[0]["status"])
            error = {"error": status} if code else {}
            event = {"end": {"exitCode": code, "exited": code >= 0, "status": status, **error}}
        elif came is not None:
            event = {"data": {str(came[0]["pipe"]): base64.b64encode(came[1]).decode()}}
        yield {"event": event}


async def _watched(record: Record, body: Json, name: str) -> None:
    await record.guest.ask("watch", name=name, path=body["path"], recursive=bool(body.get("recursive")))


def _events(header: Json) -> list[Json]:
    return [{"type": f"EVENT_TYPE_{kind}", "name": str(name)} for kind, name in header.get("events", ())]


async def _watch_folder(record: Record, body: Json, timeout_s: float | None) -> AsyncIterator[Json]:
    guest = record.guest
    async with guest.subscribed(f"w{guest.name()}") as output:
        await _watched(record, body, output.stream)
        try:
            yield {"start": {}}
            async for came in _coming(output, timeout_s):
                if came is None:
                    yield {"keepalive": {}}
                elif "end" in came[0]:
                    raise GuestError("not_found", str(came[0].get("status")))
                else:
                    for event in _events(came[0]):
                        yield {"filesystem": event}
        finally:
            guest.tell("unwatch", name=output.stream)


async def _create_watcher(record: Record, body: Json) -> Json:
    guest = record.guest
    name = f"w{guest.name()}"
    if len(record.watchers) >= MAX_WATCHERS:
        raise GuestError(
            "resource_exhausted", f"expected at most {MAX_WATCHERS} watchers, got one more; stop one"
        )
    stack = contextlib.AsyncExitStack()
    output = await stack.enter_async_context(guest.subscribed(name))
    try:
        await _watched(record, body, name)
    except BaseException:
        await stack.aclose()
        raise
    record.watchers[name] = (output, stack)
    return {"watcherId": name}


def _watcher(record: Record, body: Json) -> "tuple[Subscription, contextlib.AsyncExitStack]":
    if body.get("watcherId") not in record.watchers:
        raise GuestError("not_found", f"expected a watcher, got {body.get('watcherId')!r}")
    return record.watchers[body["watcherId"]]


async def _watcher_events(record: Record, body: Json) -> Json:
    output, _ = _watcher(record, body)
    return {"events": [event for header, _ in output.take_all() for event in _events(header)]}


async def _remove_watcher(record: Record, body: Json) -> Json:
    _, stack = _watcher(record, body)
    del record.watchers[body["watcherId"]]
    record.guest.tell("unwatch", name=body["watcherId"])
    await stack.aclose()
    return {}


MAX_WATCHERS: Final = 32


async def _download(guest: Guest, path: str) -> Response:
    header, _ = await guest.ask("stat", path=path)
    first = (await guest.ask("read", path=path, offset=0))[1]

    async def rest() -> AsyncIterator[bytes]:
        offset, data = 0, first
        while data:
            yield data
            offset += len(data)
            if len(data) < FILE_PIECE:
                return
            data = (await guest.ask("read", path=path, offset=offset))[1]

    name = quote(str(header["entry"]["name"]), safe="")
    return StreamingResponse(
        rest(),
        media_type="application/octet-stream",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "X-Content-Type-Options": "nosniff",
        },
    )


async def _upload(guest: Guest, request: Request, path: str | None) -> list[Json]:
    kind = request.headers.get("content-type", "")
    pieces = _inflated(request)
    if kind.startswith("application/octet-stream"):
        if not path:
            raise GuestError("invalid_argument", "expected a path in the query, got none")
        return [await _write(guest, path, pieces)]
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > MAX_UPLOAD:
            raise GuestError(
                "resource_exhausted", f"expected a form of at most {MAX_UPLOAD} bytes, got a larger one"
            )
    told = []
    for name, data in _form_files(kind, bytes(body)):

        async def whole(data: bytes = data) -> AsyncIterator[bytes]:
            yield data

        told.append(await _write(guest, path or name, whole()))
    return told


async def _write(guest: Guest, path: str, pieces: AsyncIterator[bytes]) -> Json:
    offset, held = 0, bytearray()
    entry: Json = {}
    async for piece in pieces:
        held += piece
        while len(held) >= FILE_PIECE:
            entry = (await guest.ask("write", bytes(held[:FILE_PIECE]), path=path, offset=offset))[0]
            offset += FILE_PIECE
            del held[:FILE_PIECE]
    if held or not offset:
        entry = (await guest.ask("write", bytes(held), path=path, offset=offset))[0]
    told: Json = entry["entry"]
    return told


async def _inflated(request: Request) -> AsyncIterator[bytes]:
    """Yield the body, unpacked where it is packed: never much of it at once."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        async for piece in _pieces(request):
            yield piece
        return
    if encoding != "gzip":
        raise GuestError("invalid_argument", f"expected a body as it is, or gzip, got {encoding!r}")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        async for piece in _pieces(request):
            while piece:
                yield unpacker.decompress(piece, FILE_PIECE)
                piece = unpacker.unconsumed_tail
    except zlib.error as error:
        raise GuestError("invalid_argument", f"expected a body of gzip, got: {error}") from None


_BOUNDARY: Final = re.compile(r'multipart/form-data;.*\bboundary="?([^";,]+)"?', re.IGNORECASE)
_FILENAME: Final = re.compile(rb'\bfilename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def _form_files(kind: str, body: bytes) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files in a form."""
    match = _BOUNDARY.match(kind)
    if match is None:
        raise GuestError(
            "invalid_argument", "expected multipart/form-data or application/octet-stream, got neither"
        )
    found = []
    for part in (b"\r\n" + body).split(b"\r\n--" + match[1].encode())[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        if (named := _FILENAME.search(head)) is None:
            raise GuestError("invalid_argument", "expected files with names in the form, got one without")
        # As browsers and httpx write it.
        name = (
            named[1].decode("utf-8", "replace").replace("%22", '"').replace('\\"', '"').replace("\\\\", "\\")
        )
        found.append((name, data))
    if not found:
        raise GuestError("invalid_argument", "expected a file in the form, got none")
    return found
