"""Parts of the MCP server by themselves: what is kept of streams, sent between rounds, written and read."""

import asyncio
import os
import threading
from typing import Any

import pytest
from mcp.server.streamable_http import GET_STREAM_KEY
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCResponse

from openenv_core.tools import Elicit, Request, Sample
from servers.mcp.context import Rounds
from servers.mcp.links import MAX_WAITING, Outbox
from servers.mcp.replies import MAX_EVENTS, MAX_WEIGHT, RecentEvents, Replies, StreamEvents, weigh
from servers.mcp.stdio import MAX_READ_AHEAD, Lines

# Events that are kept for those who come back


def answer(text: str) -> JSONRPCResponse:
    return JSONRPCResponse(jsonrpc="2.0", id=1, result={"content": [{"type": "text", "text": text}]})


def test_what_is_kept_has_bounds() -> None:
    kept = RecentEvents()
    for number in range(MAX_EVENTS + 1):
        kept.add("a", JSONRPCNotification(jsonrpc="2.0", method="m", params={"progress": number}))
    assert kept.after("1") is None
    assert (found := kept.after("2")) is not None
    assert len(found[1]) == MAX_EVENTS - 1
    vast = JSONRPCNotification(jsonrpc="2.0", method="m", params={"text": "x" * MAX_WEIGHT})
    start, place, reply = kept.add("e", None), kept.add("e", vast), kept.add("e", answer("x" * MAX_WEIGHT))
    found = kept.after(start)
    assert found is not None
    told = [(str(event.number), type(event.message)) for event in found[1]]
    assert told == [(place, type(None)), (reply, JSONRPCError)]  # heavier than all that may be: their places
    one, other = kept.add("b", answer("1")), kept.add("d", answer("2"))
    assert kept.after(one) == ("b", [])
    assert kept.after(other) == ("d", [])
    heavy = [kept.add("c", answer("x" * (MAX_WEIGHT // 3))) for _ in range(3)]
    assert kept.after(one) is None
    assert kept.after(heavy[0]) is None
    assert kept.after(heavy[1]) is not None


def test_who_waits_for_whatever_comes_is_known_as_long_as_it_has_missed_nothing() -> None:
    kept = RecentEvents()
    note = JSONRPCNotification(jsonrpc="2.0", method="m", params={})
    older, last = kept.add(GET_STREAM_KEY, note), kept.add(GET_STREAM_KEY, note)
    for _ in range(MAX_EVENTS):
        kept.add("a call", note)
    assert kept.after(last) == (GET_STREAM_KEY, [])
    assert kept.after(older) is None
    assert (found := kept.add(GET_STREAM_KEY, note))
    assert kept.after(last) is None
    assert kept.after(found) == (GET_STREAM_KEY, [])


async def test_what_is_kept_of_all_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.mcp.replies.MAX_HELD", 102_000)
    events, kept = StreamEvents(), [RecentEvents() for _ in range(4)]

    async def store(one: RecentEvents, stream: str = "s", size: int = 30_000) -> None:
        with events.of(one):
            await events.store_event(stream, answer("x" * size))

    for one in (kept[0], kept[1], kept[2], kept[0], kept[3]):
        await store(one, size=20_000 if one is kept[0] else 30_000)
    # The second was told nothing for longest.
    assert [bool(one.weight) for one in kept] == [True, False, True, True]
    events.forget(kept[3])
    await store(kept[1])
    assert [bool(one.weight) for one in kept] == [True, True, True, False]
    await store(kept[1], "n" * 90_000, 1)  # what a client calls its streams weighs too
    assert [bool(one.weight) for one in kept] == [False, False, False, False]
    assert events._weight == 0


def test_a_message_is_weighed_without_being_written() -> None:
    assert 5 * 10_000 < weigh(answer("x" * 50_000)) < 51_000
    assert weigh(None) < 100
    deep: Any = "x"
    for _ in range(5000):
        deep = {"a": [deep]}
    assert weigh(JSONRPCNotification(jsonrpc="2.0", method="m", params=deep)) > 5000


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
    while thread.is_alive() or outbox._waiting:  # noqa: ASYNC110 - what is waited for knows no event
        await asyncio.sleep(0)
    await outbox.flush()
    assert told[-1] == 4999


async def sent(*parts: bytes) -> list[Any]:
    """Send a stream of the SDK's through `Replies`; return what became of it."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    replies = Replies(send, b"id", None, answers=True)
    headers = [(b"content-type", b"text/event-stream"), (b"mcp-session-id", b"inner")]
    await replies({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await replies({"type": "http.response.body", "body": part, "more_body": True})
    await replies({"type": "http.response.body", "body": b"", "more_body": False})
    return messages


PRIMING = b"id: 1\r\ndata: \r\nretry: 1000\r\n\r\n"


def event(data: bytes) -> bytes:
    return b"id: 2\r\nevent: message\r\ndata: " + data + b"\r\n\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        b'{"jsonrpc":"2.0","id":7,"result":{}}',
        b'{"jsonrpc":"2.0","id":"a\\"b","error":{"code":1,"message":"x"}}',
    ],
)
async def test_a_reply_that_comes_first_is_sent_as_json(reply: bytes) -> None:
    for parts in ((PRIMING, event(reply)), (event(reply),)):
        head, *bodies = await sent(*parts)
        assert dict(head["headers"]) == {
            b"content-type": b"application/json",
            b"content-length": str(len(reply)).encode(),
            b"mcp-session-id": b"id",
        }
        assert [body["body"] for body in bodies] == [reply]


@pytest.mark.parametrize(
    "other",
    [
        b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":{"result":1}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"elicitation/create","params":{"requestedSchema":{"result":{}}}}',
    ],
)
async def test_what_is_told_or_asked_first_is_sent_as_a_stream(other: bytes) -> None:
    reply = event(b'{"jsonrpc":"2.0","id":7,"result":{}}')
    head, *bodies = await sent(PRIMING, event(other), reply)
    assert dict(head["headers"])[b"content-type"] == b"text/event-stream"
    assert [body["body"] for body in bodies] == [PRIMING, event(other), reply, b""]


# What travels between the rounds of one call

NAME = Elicit(message="Who?", schema={"type": "object", "properties": {}})
THOUGHT = Sample(messages="2 + 2?", max_tokens=5)
ANN = {"action": "accept", "content": {"name": "Ann"}}
FOUR = {"role": "assistant", "content": {"type": "text", "text": "4"}, "model": "m"}


def next_round(before: Rounds, responses: Any) -> Rounds:
    return Rounds(before.result()["requestState"], responses)


def both() -> dict[str, Request]:
    return {"name": NAME, "thought": THOUGHT}


def test_what_is_missing_is_asked_again_and_what_came_is_kept() -> None:
    first = Rounds(None, None)
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
        rounds = Rounds(None, {"name": wrong})
        assert rounds.answers({"name": NAME}) is None


def test_one_name_may_be_used_for_one_question_after_the_other() -> None:
    bob = ANN | {"content": {"name": "Bob"}}
    first = Rounds(None, {"name": ANN})
    assert first.answers({"name": NAME}) == {"name": ANN}
    assert first.answers({"name": NAME}) is None  # the answer was to the first
    second = next_round(first, {"name": bob})
    assert second.answers({"name": NAME}) == {"name": ANN}
    assert second.answers({"name": NAME}) == {"name": bob}


def test_a_tool_that_asks_something_else_this_time_is_answered_anew() -> None:
    first = Rounds(None, {"name": ANN})
    first.answers({"name": NAME})
    first.answers({"thought": THOUGHT})
    second = next_round(first, {"thought": FOUR})
    assert second.answers({"thought": THOUGHT}) is None
    third = next_round(second, {"thought": FOUR})
    assert third.answers({"thought": THOUGHT}) == {"thought": FOUR}
    assert third.answers({"name": NAME}) is None


# Lines of a host, read by a thread that may outlive the loop they are for


def reader() -> threading.Thread:
    (found,) = (thread for thread in threading.enumerate() if thread.name == "lines of MCP")
    return found


def test_lines_that_come_when_the_loop_has_ended_harm_nobody() -> None:
    reading, writing = os.pipe()

    async def begin() -> Lines:
        return Lines(reading, 100)

    lines = asyncio.run(begin())
    thread = reader()
    os.write(writing, b"{}\n")
    os.close(writing)
    thread.join(10)  # what it raises would fail the test
    assert not thread.is_alive()
    lines._file.close()


async def test_lines_are_read_ahead_up_to_a_bound_and_in_order() -> None:
    reading, writing = os.pipe()
    lines = Lines(reading, 100)
    thread = reader()
    sent = [f"{number}\n" for number in range(3 * MAX_READ_AHEAD)]
    os.write(writing, "".join(sent).encode())
    os.close(writing)
    seen = []
    async for line in lines:
        assert lines._lines.qsize() <= MAX_READ_AHEAD
        seen.append(line)
    assert seen == sent
    thread.join(10)
    lines._file.close()
