"""A gateway by itself, in front of a server that speaks the completions protocol: episodes over HTTP, and traces."""

import argparse
import asyncio
import json
import re
import string
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tool_fixtures import BREAK, END, MARKS, START, PieceTokenizer, chat_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "generator"))  # its stand-in for a server

from completions_server import MODEL, VOCABULARY, StandIn, completions_server

from rl_bridge.cli import gateway
from rl_bridge.config import RolloutConfig
from rl_bridge.errors import ConfigError
from rl_bridge.gateway import service as service_module
from rl_bridge.gateway.app import GatewayServer
from rl_bridge.gateway.episode import CallSettings
from rl_bridge.gateway.service import GatewayService
from rl_bridge.gateway.upstream import upstream_policy
from rl_bridge.generator.endpoint import Endpoint

ASK = {"messages": [{"role": "user", "content": "a"}]}


TEXT_ALONE = json.dumps(
    {"data": [{"id": MODEL}], "choices": [{"text": "a", "finish_reason": "stop"}]}
).encode()
"""As its list of models, and as every answer."""


class SmallTokenizer(PieceTokenizer):
    """With as many tokens as the server's policy has."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = [START, END, BREAK, *MARKS, *"\n .0123456789", *string.ascii_lowercase]
        assert len(self.pieces) == VOCABULARY
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self._best = re.compile("|".join(map(re.escape, self.pieces)))


@asynccontextmanager
async def serving(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, traces: Path | None = None
) -> AsyncIterator[tuple[GatewayService, httpx.AsyncClient]]:
    server.behaviour.max_model_len = None
    endpoint = Endpoint(url=server.url, model=MODEL)
    rollout = RolloutConfig(max_length=400, max_new_tokens=12, temperature=0.8, generate_timeout_s=20.0)
    async with upstream_policy(endpoint, chat_tokenizer(monkeypatch, SmallTokenizer()), rollout) as policy:
        service = GatewayService(policy, CallSettings(temperature=0.8), traces)
        listener = GatewayServer(service.gateway)
        await listener.start()
        try:
            async with httpx.AsyncClient(base_url=listener.url, timeout=60) as http:
                yield service, http
        finally:
            await listener.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_an_episode_ends_as_a_trace_of_what_the_server_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = tmp_path / "traces.jsonl"
    with completions_server() as server:
        async with serving(server, monkeypatch, traces) as (service, http):
            owner = bearer(service.key)
            key = (await http.post("/episodes", headers=owner)).json()["key"]
            chat: list[Any] = list(ASK["messages"])
            for word in ("b", "c"):
                body = {"messages": chat, "temperature": 0.1}
                reply = await http.post("/v1/chat/completions", json=body, headers=bearer(key))
                assert reply.status_code == 200, reply.text
                chat += [reply.json()["choices"][0]["message"], {"role": "user", "content": word}]
            end = {"key": key, "reward": 1, "metadata": {"task": 7}}
            monkeypatch.setattr(service_module, "MAX_EPISODES", 1)
            assert (await http.post("/episodes", headers=owner)).status_code == 429
            refused = await http.post("/episodes/end", json={**end, "reward": "1"}, headers=owner)
            assert (refused.status_code, traces.exists()) == (400, False)
            assert (
                await http.post("/episodes/end", json={**end, "key": "x"}, headers=owner)
            ).status_code == 404
            trace = (await http.post("/episodes/end", json=end, headers=owner)).json()
            for path, headers in (("/v1/chat/completions", bearer(key)), ("/episodes", bearer(key))):
                assert (await http.post(path, json=ASK, headers=headers)).status_code == 401
    assert [json.loads(line) for line in traces.read_text().splitlines()] == [trace]
    assert (trace["reward"], trace["metadata"]) == (1.0, {"task": 7})
    assert [(call["parent"], call["trained"]) for call in trace["calls"]] == [(None, True), (0, True)]
    (row,) = trace["rows"]
    sampled = [
        one for one in server.served if one.body["temperature"] == 0.8 and one.body["max_tokens"] == 12
    ]
    assert [row["tokens"][begin:end] for begin, end in row["answers"]] == [one.tokens for one in sampled]
    assert [row["tokens"][:begin] for begin, _ in row["answers"]] == [one.body["prompt"] for one in sampled]
    answers = {place for begin, end in row["answers"] for place in range(begin, end)}
    assert all((row["logprobs"][place] < 0) == (place in answers) for place in range(len(row["tokens"])))


async def test_command_serves_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    gateway.COMMAND.configure(parser)
    chat_tokenizer(monkeypatch, SmallTokenizer())
    with completions_server() as server:
        server.behaviour.max_model_len = None
        options = ["--endpoint", server.url, "--name", MODEL, "--max-length", "400", "--max-tokens", "12"]
        serving = asyncio.ensure_future(gateway.serve(parser.parse_args(["pieces", *options])))
        try:
            while not (printed := capsys.readouterr().out):
                assert not serving.done()
                await asyncio.sleep(0.01)
            url, key = printed.split()[0], printed.split()[-1]
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                agent = (await http.post("/episodes", headers=bearer(key))).json()["key"]
                body = {"model": "m", "input": "a"}
                assert (await http.post("/v1/responses", json=body, headers=bearer(agent))).status_code == 200
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    wrong = ["pieces", "--endpoint", "http://127.0.0.1:9/v1", "--port", "70000"]
    assert gateway.COMMAND.run(parser.parse_args(wrong)) == 2
    assert "expected --port from 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        (
            {"content": TEXT_ALONE},
            "expected the 5 most likely tokens with an answer from the server, got none",
        ),
    ],
)
async def test_server_that_lacks_what_training_needs_is_refused_before_any_call(
    monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, Any], message: str
) -> None:
    with completions_server() as server:
        for name, value in behaviour.items():
            setattr(server.behaviour, name, value)
        with pytest.raises(ConfigError, match=message):
            async with serving(server, monkeypatch):
                raise AssertionError("served")
