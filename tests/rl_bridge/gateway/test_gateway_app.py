"""What a gateway refuses before any dialect: an address where it cannot listen, and bodies too long or too deep."""

import socket
from collections.abc import AsyncIterator, Callable

import pytest
from gateway_fixtures import Stage, user

from rl_bridge.errors import ConfigError
from rl_bridge.gateway import app
from rl_bridge.gateway.app import Gateway, GatewayServer

LIMIT = 1 << 16


async def test_an_address_that_is_taken_is_named() -> None:
    """Not by ending the process, as uvicorn does: the worker that a gateway is a part of plays other episodes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = GatewayServer(Gateway(), port=port)
        with pytest.raises(ConfigError, match=rf"at 127\.0\.0\.1:{port}.*already in use"):
            await server.start()
        await server.close()
    with pytest.raises(ConfigError, match=r"at no-such-host\.invalid:0"):
        await GatewayServer(Gateway(), host="no-such-host.invalid").start()


async def test_bodies_are_bounded_and_the_episode_goes_on(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_BODY_BYTES", LIMIT)
    play = stage(["yes"])
    await play.serve()
    episode = play.open()
    headers = {"authorization": f"Bearer {episode.key}"}

    async def spaces() -> AsyncIterator[bytes]:  # in chunks, without a length
        for _ in range(64):
            yield b" " * LIMIT

    for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
        for content in (spaces(), b" " * (LIMIT + 1)):
            response = await play.http.post(path, content=content, headers=headers)
            assert (response.status_code, f"at most {LIMIT} bytes" in response.text) == (413, True), path
    deep = b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    response = await play.http.post("/v1/chat/completions", content=deep, headers=headers)
    assert (response.status_code, "a body of JSON" in response.text) == (400, True)
    assert (await play.chat(episode, [user("a")]))["content"] == "yes"
