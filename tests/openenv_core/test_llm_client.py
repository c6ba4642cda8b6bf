"""Clients of language models: requests, parsed responses, failures."""

import json
import socket

import pytest
from chat_server import chat_server

from openenv_core import llm_client
from openenv_core.errors import LLMError
from openenv_core.evaluation import endpoint
from openenv_core.llm_client import LLMResponse, OpenAIClient, ToolCall, create_llm_client

TOOL = {"name": "look", "description": "Look.", "inputSchema": {"type": "object", "properties": {"at": {}}}}
CHAT = [{"role": "user", "content": "Where is it?"}]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MIN_BACKOFF_S", 0.0)


async def test_prompts_and_tool_chats_are_sent_and_parsed() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "home"}'}}
    with chat_server("four", {"content": None, "tool_calls": [called]}, {"tool_calls": [called]}) as server:
        client = OpenAIClient("http://127.0.0.1", server.port, "m", api_key="k", system_prompt="Be brief.")
        assert await client.complete("2 + 2?", temperature=0.5) == "four"
        answer = await client.complete_with_tools(CHAT, [TOOL])
        assert await client.complete_with_tools(CHAT, [TOOL]) == answer
    assert answer == LLMResponse("", [ToolCall("c1", "look", {"at": "home"})])
    assert answer.to_message_dict()["tool_calls"][0]["function"] == called["function"] | {
        "arguments": json.dumps({"at": "home"})
    }
    first, second, _ = server.requests
    assert (first["path"], server.keys[0]) == ("/v1/chat/completions", "Bearer k")
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.5, 256, "m")
    assert second["tools"][0]["function"]["parameters"] == TOOL["inputSchema"]


async def test_only_busy_servers_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_server(429, 503, "there") as server:
        assert await OpenAIClient("http://127.0.0.1", server.port, "m").complete("?") == "there"
    assert len(server.requests) == 3
    with chat_server(500) as server, pytest.raises(LLMError, match="status 500"):
        await OpenAIClient("http://127.0.0.1", server.port, "m").complete("?")
    assert len(server.requests) == llm_client.ATTEMPTS
    with chat_server(401) as server, pytest.raises(LLMError, match="status 401"):
        await OpenAIClient("http://127.0.0.1", server.port, "m", api_key="secret").complete("?")
    assert len(server.requests) == 1
    with chat_server(b"{" + b" " * 2000) as server, monkeypatch.context() as patch:
        patch.setattr(llm_client, "MAX_ANSWER_BYTES", 1000)
        with pytest.raises(LLMError, match="more than 1000 bytes"):
            await OpenAIClient("http://127.0.0.1", server.port, "m").complete("?")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LLMError, match="ConnectError"):
        await OpenAIClient("http://127.0.0.1", port, "m").complete("?")


async def test_unreadable_responses_are_errors() -> None:
    broken = [
        {"content": "", "tool_calls": [call]}
        for call in (
            {"id": "c", "function": {"name": "look", "arguments": "{"}},
            {"id": "c", "function": {"name": "look", "arguments": {"at": "home"}}},
            {"id": "c"},
        )
    ]
    with chat_server(*broken, b"{}", b"<html>", b"[" * 100_000) as server:
        client = OpenAIClient("http://127.0.0.1", server.port, "m")
        for expected in (
            *(["expected arguments of tools in JSON"] * len(broken)),
            "expected a chat completion of",
            "got '<html>'",
            r"got '\[",
        ):
            with pytest.raises(LLMError, match=expected):
                await client.complete_with_tools(CHAT, [])


@pytest.mark.parametrize("answer", [b"no JSON for a-secret-key", b'{"error": "a-secret-key is of no use"}'])
async def test_echoed_api_key_is_redacted(answer: bytes) -> None:
    with chat_server(answer) as server:
        client = OpenAIClient("http://127.0.0.1", server.port, "m", api_key="a-secret-key\n")
        with pytest.raises(LLMError, match=r"\*\*\*") as error:
            await client.complete("?")
    assert "secret" not in str(error.value)


def test_hosted_models_get_the_fields_they_accept() -> None:
    client = create_llm_client("OpenAI", "o3-mini", "k")
    assert isinstance(client, OpenAIClient)
    body = client._request_body([], {"max_tokens": 9})
    assert body == {"model": "o3-mini", "messages": [], "max_completion_tokens": 9}
    with pytest.raises(ValueError, match="expected provider to be"):
        create_llm_client("elsewhere", "m", "k")
