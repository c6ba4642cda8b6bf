"""Parts of the MCP server by themselves: what is kept of streams, sent between rounds, written and read."""

import asyncio
import os
import threading
from typing import Any

import pytest
from mcp.server.streamable_http import GET_STREAM_KEY
from mcp_types import (
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from openenv_core.tools import Elicit, Request, Sample
from servers.mcp.context import _AnswerRounds
from servers.mcp.events import MAX_EVENTS, MAX_WEIGHT, HeldEvents, RecentEvents
from servers.mcp.hub import MAX_WAITING, Outbox
from servers.mcp.replies import Replies
from servers.mcp.stdio import MAX_READ_AHEAD, _Lines

# Events that are kept for those who come back


def answer(text: str) -> JSONRPCResponse:
    return JSONRPCResponse(jsonrpc="2.0", id=1, result={"content": [{"type": "text", "text": text}]})


async def test_what_is_kept_has_bounds() -> None:
    kept = RecentEvents(HeldEvents())
    for number in range(MAX_EVENTS + 1):
        await kept.store_event(
            "a", JSONRPCNotification(jsonrpc="2.0", method="m", params={"progress": number})
        )
    assert kept.after("1") is None
    assert (found := kept.after("2")) is not None
    assert len(found[1]) == MAX_EVENTS - 1
    vast = JSONRPCNotification(jsonrpc="2.0", method="m", params={"text": "x" * MAX_WEIGHT})
    start, place, reply = (
        await kept.store_event("e", None),
        await kept.store_event("e", vast),
        await kept.store_event("e", answer("x" * MAX_WEIGHT)),
    )
    found = kept.after(start)
    assert found is not None
    told = [(str(event.number), type(event.message)) for event in found[1]]
    assert told == [(place, type(None)), (reply, JSONRPCError)]  # heavier than all that may be: their places
    one, other = await kept.store_event("b", answer("1")), await kept.store_event("d", answer("2"))
    assert kept.after(one) == ("b", [])
    assert kept.after(other) == ("d", [])
    heavy = [await kept.store_event("c", answer("x" * (MAX_WEIGHT // 3))) for _ in range(3)]
    assert kept.after(one) is None
    assert kept.after(heavy[0]) is None
    assert kept.after(heavy[1]) is not None


async def test_who_waits_for_whatever_comes_is_known_as_long_as_it_has_missed_nothing() -> None:
    kept = RecentEvents(HeldEvents())
    note = JSONRPCNotification(jsonrpc="2.0", method="m", params={})
    older, last = await kept.store_event(GET_STREAM_KEY, note), await kept.store_event(GET_STREAM_KEY, note)
    for _ in range(MAX_EVENTS):
        await kept.store_event("a call", note)
    assert kept.after(last) == (GET_STREAM_KEY, [])
    assert kept.after(older) is None
    assert (found := await kept.store_event(GET_STREAM_KEY, note))
    assert kept.after(last) is None
    assert kept.after(found) == (GET_STREAM_KEY, [])


async def test_what_is_kept_of_all_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.mcp.events.MAX_TOTAL_WEIGHT", 102_000)
    held = HeldEvents()
    kept = [RecentEvents(held) for _ in range(4)]
    for one in (kept[0], kept[1], kept[2], kept[0], kept[3]):
        await one.store_event("s", answer("x" * (20_000 if one is kept[0] else 30_000)))
    # The second was told nothing for longest.
    assert [bool(one.weight) for one in kept] == [True, False, True, True]
    kept[3].clear()
    await kept[1].store_event("s", answer("x" * 30_000))
    assert [bool(one.weight) for one in kept] == [True, True, True, False]
    await kept[1].store_event("n" * 90_000, answer("x"))  # what a client calls its streams weighs too
    assert [bool(one.weight) for one in kept] == [False, False, False, False]
    assert held._weight == 0


# What is told, and how replies are sent


async def test_a_thread_that_tells_without_end_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    outbox = Outbox()
    told: list[int] = []
    woken: list[Any] = []
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (woken.append(args), wake(*args)))

    def tell() -> None:
        for number in range(5000):

            async def message(number: int = number) -> None:
                told.append(number)

            outbox.put(message)

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()  # the loop has no time meanwhile
    await outbox.flush()
    assert len(woken) == 1
    assert told == list(range(5000))[-MAX_WAITING:]
    thread = threading.Thread(target=tell)
    thread.start()
    while thread.is_alive() or outbox._queue:  # noqa: ASYNC110 - what is waited for knows no event
        await asyncio.sleep(0)
    await outbox.flush()
    assert told[-1] == 4999


async def sent(*messages: JSONRPCMessage | None) -> tuple[list[Any], list[bytes]]:
    """Send a stream of the SDK's through `Replies`; return what became of it, and what it was."""
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    events = RecentEvents(HeldEvents())
    replies = Replies(send, events, lambda _: None, answers=True)
    headers = [(b"content-type", b"text/event-stream"), (b"mcp-session-id", b"id")]
    await replies({"type": "http.response.start", "status": 200, "headers": headers})
    parts = []
    for message in messages:
        number = (await events.store_event("7", message)).encode()
        data = b"" if message is None else message.model_dump_json(by_alias=True, exclude_unset=True).encode()
        kind = b"retry: 1000" if message is None else b"event: message"
        parts.append(b"id: " + number + b"\r\n" + kind + b"\r\ndata: " + data + b"\r\n\r\n")
        await replies({"type": "http.response.body", "body": parts[-1], "more_body": True})
    await replies({"type": "http.response.body", "body": b"", "more_body": False})
    return told, parts


REPLIES = (
    JSONRPCResponse(jsonrpc="2.0", id=7, result={"text": "a: b"}),
    JSONRPCError(jsonrpc="2.0", id='a"b', error=ErrorData(code=1, message="x")),
)


async def test_a_reply_that_comes_first_is_sent_as_json() -> None:
    for reply in REPLIES:
        data = reply.model_dump_json(by_alias=True, exclude_unset=True).encode()
        for messages in ((None, reply), (reply,)):
            (head, *bodies), _ = await sent(*messages)
            assert dict(head["headers"]) == {
                b"content-type": b"application/json",
                b"content-length": str(len(data)).encode(),
                b"mcp-session-id": b"id",
            }
            assert [body["body"] for body in bodies] == [data]


async def test_what_is_told_or_asked_first_is_sent_as_a_stream() -> None:
    note = JSONRPCNotification(jsonrpc="2.0", method="m", params={"data": {"result": 1}})
    question = JSONRPCRequest(jsonrpc="2.0", id=1, method="elicitation/create", params={})
    for other in (note, question):
        (head, *bodies), parts = await sent(None, other, REPLIES[0])
        assert dict(head["headers"])[b"content-type"] == b"text/event-stream"
        assert [body["body"] for body in bodies] == [*parts, b""]


# What travels between the rounds of one call

NAME = Elicit(message="Who?", schema={"type": "object", "properties": {}})
THOUGHT = Sample(messages="2 + 2?", max_tokens=5)
ANN = {"action": "accept", "content": {"name": "Ann"}}
FOUR = {"role": "assistant", "content": {"type": "text", "text": "4"}, "model": "m"}


def next_round(before: _AnswerRounds, responses: Any) -> _AnswerRounds:
    return _AnswerRounds(before.result()["requestState"], responses)


def both() -> dict[str, Request]:
    return {"name": NAME, "thought": THOUGHT}


def test_what_is_missing_is_asked_again_and_what_came_is_kept() -> None:
    first = _AnswerRounds(None, None)
    assert first.answers(both()) is None
    assert list(first.result()["inputRequests"]) == ["name", "thought"]
    second = next_round(first, {"name": ANN, "other": FOUR})
    assert second.answers(both()) is None
    assert list(second.result()["inputRequests"]) == ["thought"]
    third = next_round(second, {"thought": FOUR})
    assert third.answers(both()) == {"name": ANN, "thought": FOUR}
    assert not third.open


def test_answers_of_another_kind_are_none() -> None:
    for wrong in (FOUR, 5, None, [], {"action": "perhaps"}):
        rounds = _AnswerRounds(None, {"name": wrong})
        assert rounds.answers({"name": NAME}) is None


def test_one_name_may_be_used_for_one_question_after_the_other() -> None:
    bob = ANN | {"content": {"name": "Bob"}}
    first = _AnswerRounds(None, {"name": ANN})
    assert first.answers({"name": NAME}) == {"name": ANN}
    assert first.answers({"name": NAME}) is None  # the answer was to the first
    second = next_round(first, {"name": bob})
    assert second.answers({"name": NAME}) == {"name": ANN}
    assert second.answers({"name": NAME}) == {"name": bob}


def test_a_tool_that_asks_something_else_this_time_is_answered_anew() -> None:
    first = _AnswerRounds(None, {"name": ANN})
    first.answers({"name": NAME})
    first.answers({"thought": THOUGHT})
    second = next_round(first, {"thought": FOUR})
    assert second.answers({"thought": THOUGHT}) is None
    third = next_round(second, {"thought": FOUR})
    assert third.answers({"thought": THOUGHT}) == {"thought": FOUR}
    assert third.answers({"name": NAME}) is None


# _Lines of a host, read by a thread that may outlive the loop they are for


def reader() -> threading.Thread:
    (found,) = (thread for thread in threading.enumerate() if thread.name == "lines of MCP")
    return found


async def test_lines_are_read_ahead_up_to_a_bound_and_in_order() -> None:
    reading, writing = os.pipe()
    lines = _Lines(reading, 100)
    thread = reader()
    sent = [f"{number}\n" for number in range(3 * MAX_READ_AHEAD)]
    os.write(writing, "".join(sent).encode())
    os.close(writing)
    seen = []
    async for line in lines:
        assert lines._lines.qsize() <= MAX_READ_AHEAD
        seen.append(line)
    assert seen == sent
    thread.join(60)
    lines._file.close()
