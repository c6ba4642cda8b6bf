"""docs/sandboxes.md: the class for a host of sandboxes plays on a server behind the host's token."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from doc_pages import blocks, page
from fastapi import FastAPI, Request, Response
from serving import served
from starlette.types import ASGIApp, Receive, Scope, Send

from envs.blackjack_env import BlackjackAction, BlackjackObservation
from envs.blackjack_env.server.environment import BlackjackEnvironment
from openenv_core import AccessRefusedError, GenericEnvClient, ServerStartError
from servers import create_app

KEY = "the-key-of-the-account"
TOKEN = "the-token-of-a-sandbox"
(BLOCK,) = (block for block in blocks(page("docs/sandboxes.md"), "python") if "class HostedServer" in block)


def behind_token(app: ASGIApp) -> Any:
    """Return an app that refuses every request and connection without the token, as a host's gateway does."""

    async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (b"preview-token", TOKEN.encode()) in scope["headers"]:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
        else:
            await Response(status_code=401)(scope, receive, send)

    return gateway


class Host:
    """A host of sandboxes, each of which is a server in a thread."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.running: dict[str, ExitStack] = {}
        self.app.post("/sandboxes")(self.create)
        self.app.delete("/sandboxes/{name}")(self.remove)

    async def create(self, request: Request) -> Any:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return Response(status_code=401)
        wanted = await request.json()
        stack, name = ExitStack(), f"sandbox-{len(self.running)}"
        if wanted["image"] == "broken":
            app: ASGIApp = FastAPI()  # which has no /health
        else:
            app = create_app(BlackjackEnvironment, BlackjackAction, BlackjackObservation)
        address = stack.enter_context(served(behind_token(app)))
        self.running[name] = stack
        return {"id": name, "url": f"http://{address}", "token": TOKEN}

    def remove(self, name: str) -> None:
        self.running.pop(name).close()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host()
    with served(host.app) as address:  # type: ignore[arg-type]
        monkeypatch.setenv("HOST_API_URL", f"http://{address}")
        monkeypatch.setenv("HOST_API_KEY", KEY)
        yield host
    for stack in host.running.values():
        stack.close()


def test_class_for_another_host_plays_behind_its_token(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(BLOCK, names)
    assert 4 <= int(capsys.readouterr().out) <= 21
    assert not host.running  # the client's close removed the sandbox
    hosted_server = names["HostedServer"]

    server = hosted_server("blackjack-env:latest")
    with pytest.raises(AccessRefusedError), GenericEnvClient(server.start(), provider=server).sync() as env:
        env.reset()
    assert not host.running

    server = hosted_server("broken", timeout_s=0.3)
    with pytest.raises(ServerStartError, match="broken is not healthy"):
        server.start()
    assert not host.running
