"""Checks a gateway by requests that agents have made: what is lost, doubled, mis-parented, without ids, or broken.

The requests are in `recordings/`, a line of JSON each: the sequence that it belongs to; `parent`, the index of the
request whose answer its chat continues; and what was sent, with texts and names of our own. In a chat `{"$reply": i}`
stands for the answer to request i as that agent sends it back, and `{"$results": i}` for the results of its calls, or a
user's message if it has none. So they can be made to any policy.
"""

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from itertools import groupby
from typing import Any, Final

import httpx

from rl_bridge.errors import BridgeError, ConfigError
from rl_bridge.gateway.messages import FunctionCall

TIMEOUT_S: Final = 600.0
RESULT: Final = "It is done."
RETRY_HEADER: Final = "x-stainless-retry-count"


class Fault(StrEnum):
    """What can be wrong with a gateway."""

    LOST = "lost"
    DOUBLED = "doubled"
    MISPARENTED = "mis-parented"
    WITHOUT_IDS = "without ids"
    BROKEN = "broken streams"


class BrokenStreamError(BridgeError):
    """A stream does not follow its protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """An answer as an agent has read it: its messages, items or blocks, and the calls in them."""

    parts: Sequence[Mapping[str, Any]]
    calls: Sequence[FunctionCall]


@dataclass(slots=True)
class SequenceReport:
    """What was found with one sequence: how many requests were made, and each fault in words."""

    name: str
    requests: int = 0
    faults: "defaultdict[Fault, list[str]]" = field(default_factory=lambda: defaultdict(list))


async def check_gateway(url: str, key: str) -> list[SequenceReport]:
    """Make all recorded requests to a gateway, each sequence in an episode of its own.

    Args:
        url: Its URL, without `/v1`.
        key: The key for its requests `/episodes` and `/episodes/end`.

    Raises:
        ConfigError: Nothing answers there as such a gateway does.
    """
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        return [await _check_sequence(http, key, name, requests) for name, requests in read_recordings()]


def read_recordings() -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield the name and the requests of each recorded sequence."""
    folder = files("rl_bridge.gateway") / "recordings"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        for name, requests in groupby(lines, key=lambda line: str(line["sequence"])):
            yield name, list(requests)


async def _check_sequence(
    http: httpx.AsyncClient, owner: str, name: str, requests: Sequence[Mapping[str, Any]]
) -> SequenceReport:
    report = SequenceReport(name, len(requests))
    key = (await _manage(http, "/episodes", owner, {}))["key"]
    replies: list[AgentReply] = []
    try:
        for request in requests:
            replies.append(await _send(http, key, request, replies))
        if RETRY_HEADER in requests[-1]["headers"]:
            retried = await _send(http, key, requests[-1], replies[:-1], retry=1)
            if retried != replies[-1]:
                report.faults[Fault.DOUBLED].append("a retry, marked as one, has another answer")
    except BrokenStreamError as error:
        report.faults[Fault.BROKEN].append(f"request {len(replies)}: {error}")
    except (httpx.HTTPError, ValueError) as error:
        report.faults[Fault.LOST].append(f"request {len(replies)}: {error}")
    trace = await _manage(http, "/episodes/end", owner, {"key": key})
    for fault, words in _compare(trace, [request["parent"] for request in requests[: len(replies)]]):
        report.faults[fault].append(words)
    return report


async def _manage(http: httpx.AsyncClient, path: str, owner: str, body: Mapping[str, Any]) -> Any:
    try:
        reply = await http.post(path, json=body, headers={"authorization": f"Bearer {owner}"})
        return reply.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"expected a gateway with {path} at {http.base_url} (docs/agents.md), and its key: {error}"
        ) from error


def _compare(trace: Mapping[str, Any], parents: Sequence[int | None]) -> Iterator[tuple[Fault, str]]:
    """Yield what is wrong with the trace of an episode whose answered requests have these parents."""
    calls, rows = trace["calls"], trace["rows"]
    if len(calls) != len(parents):
        fault = Fault.LOST if len(calls) < len(parents) else Fault.DOUBLED
        yield fault, f"{len(parents)} requests were answered, the trace has {len(calls)} calls"
    for index, (call, parent) in enumerate(zip(calls, parents, strict=False)):
        if call["parent"] != parent:
            yield Fault.MISPARENTED, f"request {index} continues {parent}, the trace says {call['parent']}"
        if not call["answer_tokens"]:
            yield Fault.WITHOUT_IDS, f"the answer to request {index} has no tokens"
    for number, row in enumerate(rows):
        if not len(row["tokens"]) == len(row["logprobs"]) == len(row["versions"]):
            yield Fault.WITHOUT_IDS, f"row {number} lacks log-probabilities or versions of its tokens"
    trained = Counter(end - begin for row in rows for begin, end in row["answers"])
    sampled = Counter(call["answer_tokens"] for call in calls if call["trained"])
    for fault, more in ((Fault.LOST, sampled - trained), (Fault.DOUBLED, trained - sampled)):
        if more:
            yield fault, f"{more.total()} of {sampled.total()} answers to be trained, in the rows"


async def _send(
    http: httpx.AsyncClient,
    key: str,
    request: Mapping[str, Any],
    replies: Sequence[AgentReply],
    *,
    retry: int = 0,
) -> AgentReply:
    """Make a recorded request; returns the answer to it.

    Raises:
        BrokenStreamError: Its stream is not as the protocol says.
        httpx.HTTPError: It was not answered.
    """
    client = _CLIENTS[request["path"].partition("?")[0]]
    body = dict(request["body"])
    body[client.chat_key] = [
        message for entry in body[client.chat_key] for message in client.expand(entry, replies)
    ]
    headers = {**request["headers"], "authorization": f"Bearer {key}"}
    if retry:
        headers[RETRY_HEADER] = str(retry)
    async with http.stream("POST", request["path"], json=body, headers=headers) as response:
        if response.is_error:
            await response.aread()
            raise ValueError(f"status {response.status_code}: {response.text:.300}")
        events = [event async for event in _read_events(response)]
    try:
        return client.read(events)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BrokenStreamError(f"{type(error).__name__}: {error}, in {len(events)} events") from error


async def _read_events(response: httpx.Response) -> AsyncIterator[Any]:
    """Yield the data of a stream's events; None for the end of one of chat completions."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


def _require(condition: object, expected: str) -> None:
    if not condition:
        raise BrokenStreamError(f"expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    """How an agent of a protocol reads an answer, and sends it back.

    Attributes:
        chat_key: The key of the chat in a request's body.
        read: Reads the events of a stream.
        write_results: Returns the messages with the calls' results, given what the recording has beside them.
    """

    chat_key: str
    read: Callable[[Sequence[Any]], AgentReply]
    write_results: Callable[[Sequence[FunctionCall], Sequence[Any]], Sequence[Mapping[str, Any]]]

    def expand(self, entry: Mapping[str, Any], replies: Sequence[AgentReply]) -> Sequence[Mapping[str, Any]]:
        """Return the messages that an entry of a recorded chat stands for."""
        if "$reply" in entry:
            return replies[int(entry["$reply"])].parts
        if "$results" in entry:
            more: Sequence[Any] = entry.get("more", ())
            return self.write_results(replies[int(entry["$results"])].calls, more)
        return [entry]


def _read_chat(events: Sequence[Any]) -> AgentReply:
    _require(events and events[-1] is None, "[DONE] at the end")
    _require(events[-2]["usage"]["completion_tokens"], "the usage before the end")
    text, written = "", defaultdict[int, dict[str, str]](lambda: {"id": "", "name": "", "arguments": ""})
    finishes = []
    for choice in (choice for chunk in events[:-1] for choice in chunk["choices"]):
        delta = choice["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            written[call["index"]]["id"] += call.get("id", "")
            for name in ("name", "arguments"):
                written[call["index"]][name] += call["function"].get(name, "")
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    _require(
        finishes == ["tool_calls" if written else finishes[0]], f"one fitting finish_reason, got {finishes}"
    )
    calls = [
        FunctionCall(id=call["id"], name=call["name"], arguments=json.loads(call["arguments"]))
        for call in written.values()
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:  # written once more, without spaces, as clients in JavaScript do
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, separators=(",", ":")),
                },
            }
            for call in calls
        ]
    return AgentReply(parts=[message], calls=calls)


def _write_chat_results(calls: Sequence[FunctionCall], more: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    if not calls:
        return [{"role": "user", "content": RESULT}]
    return [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls]


def _read_messages(events: Sequence[Any]) -> AgentReply:
    events = [event for event in events if event["type"] != "ping"]
    _require(events[0]["type"] == "message_start", "message_start at first")
    _require(
        [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"], "both ends at last"
    )
    blocks: list[dict[str, Any]] = []
    written, is_open = "", False
    for event in events[1:-2]:
        kind = event["type"]
        _require(is_open == (kind != "content_block_start"), f"no {kind} here")
        if kind == "content_block_start":
            blocks.append(dict(event["content_block"]))
            written, is_open = "", True
        elif kind == "content_block_delta":
            delta = event["delta"]
            written += delta.get("text") or delta.get("partial_json") or ""
        else:
            is_open = False
            if blocks[-1]["type"] == "text":
                blocks[-1]["text"] = written
            elif blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(written)
        _require(event["index"] == len(blocks) - 1, "blocks in their order")
    calls = [
        FunctionCall(id=block["id"], name=block["name"], arguments=block["input"])
        for block in blocks
        if block["type"] == "tool_use"
    ]
    reason = events[-2]["delta"]["stop_reason"]
    _require((reason == "tool_use") == bool(calls), f"a fitting stop_reason, got {reason}")
    return AgentReply(parts=[{"role": "assistant", "content": blocks}], calls=calls)


def _write_messages_results(
    calls: Sequence[FunctionCall], more: Sequence[Any]
) -> Sequence[Mapping[str, Any]]:
    text = {"type": "text", "text": RESULT}
    blocks: list[Mapping[str, Any]] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [text]} for call in calls
    ]
    return [{"role": "user", "content": [*(blocks or [text]), *more]}]


def _read_responses(events: Sequence[Any]) -> AgentReply:
    numbers = [event["sequence_number"] for event in events]
    _require(numbers == sorted(set(numbers)), "growing sequence numbers")
    _require(events[0]["type"] == "response.created", "response.created at first")
    last = events[-1]
    _require(last["type"] in ("response.completed", "response.incomplete"), "the whole response at last")
    items = last["response"]["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    _require(items == done, "the items of the whole response to be those before")
    calls = [
        FunctionCall(id=item["call_id"], name=item["name"], arguments=json.loads(item["arguments"]))
        for item in items
        if item["type"] == "function_call"
    ]
    return AgentReply(parts=[item for item in items if item["type"] != "reasoning"], calls=calls)


def _write_responses_results(
    calls: Sequence[FunctionCall], more: Sequence[Any]
) -> Sequence[Mapping[str, Any]]:
    text: dict[str, Any] = {"type": "input_text", "text": RESULT}
    results = [{"type": "function_call_output", "call_id": call.id, "output": [text, text]} for call in calls]
    return results or [{"type": "message", "role": "user", "content": [text]}]


_CLIENTS: Final = {
    "/v1/chat/completions": _Client(chat_key="messages", read=_read_chat, write_results=_write_chat_results),
    "/v1/messages": _Client(chat_key="messages", read=_read_messages, write_results=_write_messages_results),
    "/v1/responses": _Client(chat_key="input", read=_read_responses, write_results=_write_responses_results),
}
