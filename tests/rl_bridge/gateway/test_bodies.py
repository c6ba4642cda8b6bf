"""Bodies that no request may have: too long, whether or not the client says so, and too deep."""

from collections.abc import AsyncIterator, Callable

import pytest
from gateway_fixtures import Stage, user

from rl_bridge.gateway import app

LIMIT = 1 << 16


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
