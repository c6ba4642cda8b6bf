"""An MCP server over streamable HTTP that misbehaves on request."""

import asyncio
import gzip
import json
from collections import Counter
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TOOLS = [
    {"name": "count", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
]


class Site:
    """An app that records its requests, and settings of its behaviour.

    Attributes:
        seen: Requests by method and path.
        headers: Headers of the last request.
        counts: Calls by session; ended sessions are removed.
        hung: Number of calls that were not answered.
        given_up: Number of those whose client has disconnected.
        answer: Response to tool calls, instead of the result.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.headers: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.answer: Response | None = None
        self.handshake = True
        self.hung = 0
        self.given_up = 0
        self.app = Starlette(
            routes=[
                Route("/mcp", self.mcp, methods=["POST", "GET", "DELETE"]),
                Route("/elsewhere", self.mcp, methods=["POST"]),
            ]
        )

    async def mcp(self, request: Request) -> Response:
        self.seen[f"{request.method} {request.url.path}"] += 1
        self.headers = dict(request.headers)
        session = request.headers.get("mcp-session-id", "")
        if request.method == "DELETE":
            self.counts.pop(session, None)
            return Response(status_code=200)
        if request.method == "GET":
            return Response(status_code=405)
        message = await request.json()
        method, number = message["method"], message.get("id")
        if number is None:
            return Response(status_code=202)
        if method == "initialize" and self.handshake:
            session = uuid4().hex
            self.counts[session] = 0
            result = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "site", "version": "1"},
            }
            return self.reply(number, result, session)
        if method == "server/discover" and not self.handshake:
            result = {
                "resultType": "complete",
                "supportedVersions": ["2026-07-28"],
                "capabilities": {"tools": {}},
                "ttlMs": 0,
                "cacheScope": "private",
            }
            return self.reply(number, result)
        if method == "tools/list":
            more = {} if self.handshake else {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            return self.reply(number, {"tools": TOOLS, **more})
        if method == "tools/call":
            if self.answer is not None:
                return self.answer
            if message["params"]["name"] == "hang":
                self.hung += 1
                while not await request.is_disconnected():  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.02)
                self.given_up += 1
                return Response(status_code=204)
            if self.handshake and session not in self.counts:
                return Response(status_code=404)
            self.counts[session] = self.counts.get(session, 0) + 1
            more = {} if self.handshake else {"resultType": "complete"}
            return self.reply(
                number, {"content": [{"type": "text", "text": str(self.counts[session])}], **more}
            )
        error = {"code": -32601, "message": "Method not found"}
        return JSONResponse({"jsonrpc": "2.0", "id": number, "error": error})

    def reply(self, number: Any, result: Any, session: str = "") -> Response:
        headers = {"mcp-session-id": session} if session else {}
        return JSONResponse({"jsonrpc": "2.0", "id": number, "result": result}, headers=headers)


def packed(message: Any) -> Response:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    return Response(gzip.compress(json.dumps(message).encode()), headers=headers)
