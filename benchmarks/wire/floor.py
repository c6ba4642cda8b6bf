"""The floor: a bare ASGI application that echoes OpenEnv steps, without validation, sessions or errors."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import orjson

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

WAIT_S = 1.0


async def plain(scope: Message, receive: Receive, send: Send) -> None:
    """Echo at once."""
    await _serve(scope, receive, send, 0)


async def waiting(scope: Message, receive: Receive, send: Send) -> None:
    """Echo a step after a second."""
    await _serve(scope, receive, send, WAIT_S)


async def _serve(scope: Message, receive: Receive, send: Send, wait_s: float) -> None:
    if scope["type"] == "websocket":
        await _echo(receive, send, wait_s)
    elif scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"status":"healthy"}'})


async def _echo(receive: Receive, send: Send, wait_s: float) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    count = 0
    while (message := await receive())["type"] == "websocket.receive":
        frame = orjson.loads(message["text"])
        if frame["type"] == "reset":
            count, reward, echoed = 0, None, "ready"
        else:
            if wait_s:
                await asyncio.sleep(wait_s)
            count, reward, echoed = count + 1, 1.0, frame["data"]["message"]
        observation = {"metadata": {}, "echoed": echoed, "step": count}
        data = {"observation": observation, "reward": reward, "done": False}
        await send(
            {"type": "websocket.send", "text": orjson.dumps({"type": "observation", "data": data}).decode()}
        )
