"""A third-party ASGI app that returns its environment variables, and on /loop the package of its event loop."""

import asyncio
import json
import os
import sys
from typing import Any


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    if scope["path"] == "/hang":
        sys.stdout.write("hanging now\n")
        sys.stdout.flush()
        await asyncio.sleep(3600)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    body = json.dumps(loop if scope["path"] == "/loop" else json.dumps(dict(os.environ))).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})
