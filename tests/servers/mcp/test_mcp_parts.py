"""Parts of the MCP server: recent events, the outbox, replies, multi-round requests, stdin."""

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
from servers.mcp.stdio import StandardStreams

# Events that are kept for those who come back


def answer(text: str) -> JSONRPCResponse:
    return JSONRPCResponse(jsonrpc="2.0", id=1, result={"content": [{"type": "text", "text": text}]})


async def test_recent_events_of_a_connection_are_bounded() -> None:
    recent = RecentEvents(HeldEvents())
    for number in range(MAX_EVENTS + 1):
        await recent.store_event(
            "a", JSONRPCNotification(jsonrpc="2.0", method="m", params={"progress": number})
        )
    assert recent.after("1") is None
    assert (retained := recent.after("2")) is not None
    assert len(retained[1]) == MAX_EVENTS - 1
    vast = JSONRPCNotification(jsonrpc="2.0", method="m", params={"text": "x" * MAX_WEIGHT})
    messages = (None, vast, answer("x" * MAX_WEIGHT))
    start, place, reply = [await recent.store_event("e", message) for message in messages]
    retained = recent.after(start)
    assert retained is not None
    event_kinds = [(event_id, type(message)) for event_id, message in retained[1].items()]
    # Of what is heavier than all that may be, its place is kept.
    assert event_kinds == [(place, type(None)), (reply, JSONRPCError)]
    one, other = await recent.store_event("b", answer("1")), await recent.store_event("d", answer("2"))
    assert recent.after(one) == ("b", {})
    assert recent.after(other) == ("d", {})
    heavy = [await recent.store_event("c", answer("x" * (MAX_WEIGHT // 3))) for _ in range(3)]
    assert recent.after(one) is None
    assert recent.after(heavy[0]) is None
    assert recent.after(heavy[1]) is not None


async def test_get_stream_can_resume_until_it_has_missed_an_event() -> None:
    recent = RecentEvents(HeldEvents())
    note = JSONRPCNotification(jsonrpc="2.0", method="m", params={})
    older, last = [await recent.store_event(GET_STREAM_KEY, note) for _ in range(2)]
    for _ in range(MAX_EVENTS):
        await recent.store_event("a call", note)
    assert recent.after(last) == (GET_STREAM_KEY, {})
    assert recent.after(older) is None
    assert (newest := await recent.store_event(GET_STREAM_KEY, note))
    assert recent.after(last) is None
    assert recent.after(newest) == (GET_STREAM_KEY, {})


async def test_recent_events_of_all_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.mcp.events.MAX_TOTAL_WEIGHT", 102_000)
    held = HeldEvents()
    stores = [RecentEvents(held) for _ in range(4)]
    for one in (stores[0], stores[1], stores[2], stores[0], stores[3]):
        await one.store_event("s", answer("x" * (20_000 if one is stores[0] else 30_000)))
    # The second was told nothing for longest.
    assert [bool(one.weight) for one in stores] == [True, False, True, True]
    stores[3].clear()
    await stores[1].store_event("s", answer("x" * 30_000))
    assert [bool(one.weight) for one in stores] == [True, True, True, False]
    await stores[1].store_event("n" * 90_000, answer("x"))  # what a client calls its streams weighs too
    assert [bool(one.weight) for one in stores] == [False, False, False, False]
    assert held._weight == 0


# What is told, and how replies are sent


async def test_outbox_stays_bounded_under_a_flood_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    outbox = Outbox()
    delivered: list[int] = []
    woken: list[Any] = []
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (woken.append(args), wake(*args)))

    def tell() -> None:
        for number in range(5000):

            async def message(number: int = number) -> None:
                delivered.append(number)

            outbox.put(message)

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()  # the loop has no time meanwhile
    await outbox.flush()
    assert len(woken) == 1
    assert delivered == list(range(5000))[-MAX_WAITING:]
    thread = threading.Thread(target=tell)
    thread.start()
    while thread.is_alive() or outbox._queue:  # noqa: ASYNC110 - what is waited for knows no event
        await asyncio.sleep(0)
    await outbox.flush()
    assert delivered[-1] == 4999


async def sent(*messages: JSONRPCMessage | None) -> tuple[list[Any], list[bytes]]:
    """Send a stream of the SDK through `Replies`; return the messages sent, and the original parts."""
    messages_sent: list[Any] = []

    async def send(message: Any) -> None:
        messages_sent.append(message)

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
    return messages_sent, parts


REPLIES = (
    JSONRPCResponse(jsonrpc="2.0", id=7, result={"text": "a: b"}),
    JSONRPCError(jsonrpc="2.0", id='a"b', error=ErrorData(code=1, message="x")),
)


async def test_reply_without_earlier_messages_is_sent_as_json() -> None:
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


async def test_notification_or_request_before_the_reply_makes_it_a_stream() -> None:
    note = JSONRPCNotification(jsonrpc="2.0", method="m", params={"data": {"result": 1}})
    question = JSONRPCRequest(jsonrpc="2.0", id=1, method="elicitation/create", params={})
    for other in (note, question):
        (head, *bodies), parts = await sent(None, other, REPLIES[0])
        assert dict(head["headers"])[b"content-type"] == b"text/event-stream"
        assert [body["body"] for body in bodies] == [*parts, b""]


# What travels between the rounds of one call

NAME = Elicit(message="Who?", schema={"type": "object", "properties": {}})
THOUGHT = Sample(messages="2 + 2?", max_tokens=5)
BOTH: dict[str, Request] = {"name": NAME, "thought": THOUGHT}
ANN = {"action": "accept", "content": {"name": "Ann"}}
FOUR = {"role": "assistant", "content": {"type": "text", "text": "4"}, "model": "m"}


def next_round(before: _AnswerRounds, responses: Any) -> _AnswerRounds:
    return _AnswerRounds(before.result()["requestState"], responses)


def test_missing_answers_are_requested_again_and_given_ones_are_kept() -> None:
    for wrong in (None, FOUR, 5, [], {"action": "perhaps"}):
        first = _AnswerRounds(None, wrong and {"name": wrong})
        assert first.answers(BOTH) is None
    assert list(first.result()["inputRequests"]) == ["name", "thought"]
    second = next_round(first, {"name": ANN, "other": FOUR})
    assert second.answers(BOTH) is None
    assert list(second.result()["inputRequests"]) == ["thought"]
    third = next_round(second, {"thought": FOUR})
    assert third.answers(BOTH) == {"name": ANN, "thought": FOUR}
    assert not third.open


def test_different_question_in_a_later_round_is_asked_again() -> None:
    first = _AnswerRounds(None, {"name": ANN})
    first.answers({"name": NAME})
    first.answers({"thought": THOUGHT})
    second = next_round(first, {"thought": FOUR})
    assert second.answers({"thought": THOUGHT}) is None
    third = next_round(second, {"thought": FOUR})
    assert third.answers({"thought": THOUGHT}) == {"thought": FOUR}
    assert third.answers({"name": NAME}) is None


# Lines of a host, read in a thread


async def test_lines_come_in_order_without_those_that_are_empty_or_too_long() -> None:
    reading, writing = os.pipe()
    lines = StandardStreams(reading, 1, 100)
    os.write(writing, b"1\n\n" + b"x" * 250 + b"\n2\n3")
    os.close(writing)
    assert [line async for line in lines] == ["1\n", "2\n", "3"]
    lines._input.close()
