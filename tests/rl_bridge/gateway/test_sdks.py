"""The providers' own clients against the gateway, in every dialect, whole and as streams."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_fixtures import ADD, TOOLS, Stage, trained, user
from missing import require

from rl_bridge.gateway.sampled import SampledEpisode

pytestmark = pytest.mark.slow

openai = require("openai")
anthropic = require("anthropic")

Make = Callable[..., Stage]
THOUGHT = "<think>\nhm\n</think>\n\n"
SCRIPT = [f"{THOUGHT}I add. {ADD}\n{ADD}", "It is 3."]
FUNCTION = TOOLS[0]["function"]


def check(play: Stage, episode: SampledEpisode) -> None:
    """One row, with all that was sampled."""
    (row,) = play.texts(episode)
    assert [tokens for tokens, _ in trained(episode)] == [list(one.tokens) for one in play.generator.sampled]
    first, second = play.generator.asked
    assert row.count("add") >= 3
    assert second.startswith(f"{first}{SCRIPT[0]}")
    assert second.count("<tool_response>\n3\n</tool_response>") == 2


async def complete_chat(client: Any, stream: bool, **options: Any) -> Any:
    """Return the message of an answer; of a stream, as the SDK puts it together."""
    if not stream:
        return (await client.chat.completions.create(model="m", tools=TOOLS, **options)).choices[0].message
    text, calls, usage = "", [], None
    async for chunk in await client.chat.completions.create(
        model="m", tools=TOOLS, stream=True, stream_options={"include_usage": True}, **options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
    assert usage.completion_tokens > 0
    message = {"role": "assistant", "content": text, "tool_calls": [one.model_dump() for one in calls]}
    return openai.types.chat.ChatCompletionMessage.model_validate(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep_alive_s", [10.0, 0.01])
async def test_openai_chat(stage: Make, stream: bool, keep_alive_s: float) -> None:
    play = stage(SCRIPT, keep_alive_s=keep_alive_s)
    play.generator.before = lambda: asyncio.sleep(0.05)  # five keep-alives, or none
    url, episode = await play.serve(), play.open()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=episode.key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        chat: list[Any] = [user("sum")]
        first = await complete_chat(client, stream, messages=chat)
        assert (first.content, len(first.tool_calls)) == ("I add.", 2)
        chat.append(first.model_dump(exclude_none=True))
        chat += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in first.tool_calls]
        second = await complete_chat(client, stream, messages=chat)
    assert second.content == "It is 3."
    check(play, episode)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep_alive_s", [10.0, 0.01])
async def test_openai_responses(stage: Make, stream: bool, keep_alive_s: float) -> None:
    play = stage(SCRIPT, keep_alive_s=keep_alive_s)
    play.generator.before = lambda: asyncio.sleep(0.05)
    url, episode = await play.serve(), play.open()
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    items: list[Any] = [user("sum")]

    async def respond(client: Any) -> Any:
        options = {"model": "m", "input": items, "tools": tools, "instructions": "Be brief."}
        if not stream:
            return await client.responses.create(**options)
        async with client.responses.stream(**options) as events:
            return await events.get_final_response()

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=episode.key) as client:
        first = await respond(client)
        assert [item.type for item in first.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert (first.output_text, json.loads(first.output[2].arguments)) == ("I add.", {"a": 1, "b": 2})
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await respond(client)
    assert (second.output_text, second.status) == ("It is 3.", "completed")
    check(play, episode)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep_alive_s", [10.0, 0.01])
async def test_anthropic_messages(stage: Make, stream: bool, keep_alive_s: float) -> None:
    play = stage(SCRIPT, keep_alive_s=keep_alive_s)
    play.generator.before = lambda: asyncio.sleep(0.05)
    url, episode = await play.serve(), play.open()
    tool = {"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}
    chat: list[Any] = [user("sum")]

    async def write(client: Any) -> Any:
        options = {"model": "m", "max_tokens": 100, "messages": chat, "tools": [tool], "system": "Be brief."}
        if not stream:
            return await client.messages.create(**options)
        async with client.messages.stream(**options) as events:
            return await events.get_final_message()

    async with anthropic.AsyncAnthropic(base_url=url, api_key=episode.key) as client:
        counted = await client.messages.count_tokens(
            model="m", messages=chat, tools=[tool], system="Be brief."
        )
        first = await write(client)
        assert counted.input_tokens == first.usage.input_tokens
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first.stop_reason, first.content[2].input) == ("tool_use", {"a": 1, "b": 2})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "3"}]}
            for block in first.content[2:]
        ]
        chat += [
            {
                "role": "assistant",
                "content": [block.model_dump(exclude_none=True) for block in first.content],
            },
            {"role": "user", "content": results},
        ]
        second = await write(client)
    assert (second.content[0].text, second.stop_reason) == ("It is 3.", "end_turn")
    assert second.usage.cache_read_input_tokens > first.usage.input_tokens
    check(play, episode)


async def test_refusals_are_the_sdks_own_errors(stage: Make) -> None:
    play = stage([])
    url, episode = await play.serve(), play.open()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    async with anthropic.AsyncAnthropic(base_url=url, api_key=episode.key) as client:
        with pytest.raises(anthropic.BadRequestError, match="leave images"):
            await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}]
            )
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="another") as other:
        with pytest.raises(openai.AuthenticationError, match="being played"):
            await other.responses.create(model="m", input="a")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=episode.key) as mine:
        with pytest.raises(openai.BadRequestError, match="leave images"):
            await mine.responses.create(
                model="m", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]
            )
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await mine.responses.create(model="m", input="a", previous_response_id="r")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # its own
async def test_litellm(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    litellm = require("litellm")
    play = stage(SCRIPT)
    url, episode = await play.serve(), play.open()
    chat: list[Any] = [user("sum")]
    options = {"model": "openai/m", "base_url": f"{url}/v1", "api_key": episode.key, "tools": TOOLS}
    first = (await litellm.acompletion(messages=chat, **options)).choices[0].message
    chat.append(first.model_dump())
    chat += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in first.tool_calls]
    second = await litellm.acompletion(messages=chat, **options)
    assert second.choices[0].message.content == "It is 3."
    check(play, episode)
