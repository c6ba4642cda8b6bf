"""E2B's code interpreter API: runs cells in contexts and streams their output line by line."""

import asyncio
import codecs
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from servers.sandboxes.envd import Find, message_of, read_messages
from servers.sandboxes.guest import ApiError, GuestError, Subscription
from servers.sandboxes.table import Record, SandboxTable

DEFAULT: Final = "default"
MAX_CONTEXTS: Final = 16


def routes(find: Find, table: SandboxTable) -> list[Route]:
    """Return the routes of the API.

    Args:
        find: Returns the sandbox that a request is for, or raises.
        table: Runs the tasks that outlive their request.
    """

    async def execute(request: Request) -> Response:
        record, body = find(request), await _python(request)
        code, envs = body.get("code"), body.get("env_vars") or {}
        name = body.get("context_id") or DEFAULT
        if not isinstance(code, str) or not isinstance(name, str) or not isinstance(envs, dict):
            raise ApiError(400, "code and context_id must be text, and env_vars an object")
        if name == DEFAULT:
            await _make(record, DEFAULT, "")
        _, turn = _context(record, name)
        lines = _run(record, table, name, turn, code, envs)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def contexts(request: Request) -> Response:
        record = find(request)
        if request.method == "GET":
            return JSONResponse([entry for entry, _ in record.contexts.values()])
        body = await _python(request)
        return JSONResponse(await _make(record, record.guest.name(), str(body.get("cwd") or "")))

    async def context(request: Request) -> Response:
        record, name = find(request), request.path_params["id"]
        _context(record, name)
        if request.method == "DELETE":
            del record.contexts[name]
        await record.guest.ask("drop" if request.method == "DELETE" else "restart", name=name)
        return Response(status_code=204)

    return [
        Route("/execute", execute, methods=["POST"]),
        Route("/contexts", contexts, methods=["GET", "POST"]),
        Route("/contexts/{id}", context, methods=["DELETE"]),
        Route("/contexts/{id}/restart", context, methods=["POST"]),
    ]


async def _python(request: Request) -> dict[str, Any]:
    """Return a request's body; ApiError if its language is not Python."""
    body = message_of(await request.body())
    if (language := body.get("language")) not in (None, "", "python", "python3"):
        raise ApiError(400, f"expected the language python, got {language!r}; run others as commands")
    return body


def _context(record: Record, name: str) -> tuple[dict[str, str], asyncio.Lock]:
    if name not in record.contexts:
        raise ApiError(404, f"Context {name} not found")
    return record.contexts[name]


async def _make(record: Record, name: str, cwd: str) -> dict[str, str]:
    """Return a context as clients see it; create it if it does not exist."""
    async with record.making:
        if name not in record.contexts:
            if len(record.contexts) >= MAX_CONTEXTS:
                raise ApiError(429, f"there are {MAX_CONTEXTS} contexts, the most allowed; remove one")
            header, _ = await record.guest.ask("context", name=name, cwd=cwd)
            context = {"id": name, "language": "python", "cwd": str(header["cwd"])}
            record.contexts[name] = (context, asyncio.Lock())
        return record.contexts[name][0]


async def _run(
    record: Record, table: SandboxTable, name: str, turn: asyncio.Lock, code: str, envs: dict[str, str]
) -> AsyncIterator[bytes]:
    """Run a cell once the context's lock is free; the client's disconnection interrupts it."""
    # Acquired here, not by the caller: if the client has disconnected, this generator may never start, and would never
    # release the lock.
    await turn.acquire()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(turn.release)
        output = await stack.enter_async_context(record.guest.subscribed(name))
        runs = False
        try:
            await record.guest.ask("run", name=name, code=code, envs=envs)
            runs = True
            async for line in _lines(output):
                yield line
        except GuestError as error:
            if runs and not record.guest.gone.done():  # it wrote faster than the client reads
                table.spawn(_interrupt(record, name, output, stack.pop_all()), f"interrupt in {record.id}")
            yield _line("error", name="SandboxError", value=str(error), traceback=str(error))
        except BaseException:
            table.spawn(_interrupt(record, name, output, stack.pop_all()), f"interrupt in {record.id}")
            raise


async def _interrupt(
    record: Record, name: str, output: Subscription, stack: contextlib.AsyncExitStack
) -> None:
    """Interrupt an abandoned cell and release the context for the next one."""
    async with stack:
        record.guest.notify("interrupt", name=name)
        while (message := await output.take()) is not None and "end" not in message[0]:
            pass


async def _lines(output: Subscription) -> AsyncIterator[bytes]:
    decoders = {pipe: codecs.getincrementaldecoder("utf-8")("replace") for pipe in ("stdout", "stderr")}
    async for message in read_messages(output, None):
        if message is None:
            continue
        header, blob = message
        if "line" in header:
            yield blob.replace(b"\n", b" ") + b"\n"
        elif (pipe := str(header.get("pipe"))) in decoders and (text := decoders[pipe].decode(blob)):
            yield _line(pipe, text=text, timestamp=time.time_ns())


def _line(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, **fields}).encode() + b"\n"
