"""Bytes and messages that no client should send, on a real server. FUZZ_EXAMPLES says how many."""

import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fuzzing import EXAMPLES, dice
from fuzzwire import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, RawClient, frame
from serve_process import ServeProcess, eventually, serve
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

WAIT_TIMEOUT_S = 30
MB = 1 << 20

STATE = {"type": "state"}
STEP = {"type": "step", "data": {"text": "hello", "times": 2, "manner": "plain", "metadata": {}}}
RESET = {"type": "reset", "data": {"seed": 3, "episode_id": "e"}}
RPC = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
MCP = {"type": "mcp", "data": RPC}
VALID: list[Any] = [STATE, STEP, RESET, {"type": "reset"}, MCP]

PLACES = {str(place).encode() for place in (Path.home(), Path(__file__).parents[2], sys.prefix)} - {b"/"}
LEAKS = (b"Traceback", b'File \\"', b'File "', b".py", b"site-packages", b"0x7f", *sorted(PLACES))
"""What shows that the inside of the server has got into a reply."""


@pytest.fixture(scope="module", params=["fuzz_app:app", "fuzz_app:in_threads"])
def server(request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    """A server with two slots: for a witness and a misbehaving client. A leaked slot blocks the tests."""
    with serve("--max-sessions", "2", app=request.param) as running:
        yield running
        assert "Traceback" not in running.output, running.output
        assert "never awaited" not in running.output, running.output


@contextmanager
def session(server: ServeProcess, path: str = "/ws") -> Iterator[ClientConnection]:
    with connect(
        f"ws://{server.address}{path}",
        compression=None,
        proxy=None,
        max_size=None,
        open_timeout=WAIT_TIMEOUT_S,
    ) as client:
        yield client


def exchange(client: ClientConnection, message: str | bytes) -> bytes:
    client.send(message)
    reply = client.recv(timeout=WAIT_TIMEOUT_S, decode=False)
    assert isinstance(reply, bytes)
    return reply


class Witness:
    """A well-behaved session that detects any interference."""

    def __init__(self, client: ClientConnection) -> None:
        self._client = client
        self._turn = 0
        self._ask({"type": "reset", "data": {"episode_id": "witness"}})

    def looks(self) -> None:
        self._turn += 1
        reply = self._ask({"type": "step", "data": {"text": f"turn {self._turn}"}})
        assert reply["data"]["observation"]["turn"] == self._turn
        assert reply["data"]["observation"]["echo"] == f"turn {self._turn}"

    def _ask(self, request: Any) -> Any:
        return json.loads(exchange(self._client, json.dumps(request)))


@pytest.fixture
def witness(server: ServeProcess) -> Iterator[Witness]:
    wait_for_a_free_slot(server)
    with session(server) as client:
        yield Witness(client)


@contextmanager
def connection_with_slot(server: ServeProcess) -> Iterator[RawClient]:
    """Yield a connection that has a slot; slots of earlier tests may take a moment to come back."""
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while True:
        with RawClient(server.port) as client:
            assert client.send(frame(json.dumps(STATE).encode()))
            first = client.next_frame()
            assert first is not None
            if json.loads(first[1])["type"] == "state":
                yield client
                return
            assert time.monotonic() < deadline, first


def wait_for_a_free_slot(server: ServeProcess) -> None:
    """Wait until a slot is free, and use it."""

    def room() -> bool:
        try:
            with session(server) as client:
                return bool(json.loads(exchange(client, json.dumps(STATE)))["type"] == "state")
        except ConnectionClosed:
            return False

    eventually(room)


def assert_no_leak(text: bytes) -> None:
    assert not any(leak in text for leak in LEAKS), text[:2000]


# Bytes

WRONG: dict[str, tuple[bytes, set[int]]] = {
    # What is sent, and the codes that the connection may be closed with.
    "unmasked": (frame(b"{}", masked=False), {1002}),
    "reserved opcode": (frame(b"{}", 3), {1002}),
    "reserved control opcode": (frame(b"", 11), {1002}),
    "compressed bit": (frame(b"{}", reserved=4), {1002}),
    "reserved bits": (frame(b"{}", reserved=3), {1002}),
    "continuation of nothing": (frame(b"{}", CONTINUATION), {1002}),
    "message within a message": (frame(b"{", fin=False) + frame(b"{}"), {1002}),
    "control frame too long": (frame(b"x" * 126, PING), {1002}),
    "control frame in parts": (frame(b"x", PING, fin=False), {1002}),
    "close of one byte": (frame(b"\x03", CLOSE), {1002}),
    "close with a code that is none": (frame(b"\x00\x01", CLOSE), {1002}),
    "close with a reason that is no text": (frame(b"\x03\xe8\xff\xfe", CLOSE), {1002, 1007}),
    "length of 2^63": (frame(declared=1 << 63, length_bytes=8), {1002, 1009}),
    "length of 2^63 - 1": (frame(declared=(1 << 63) - 1, length_bytes=8), {1009}),
    "length of a gigabyte": (frame(declared=1 << 30, length_bytes=8), {1009}),
    "a gigabyte of control": (frame(b"", PING, declared=1 << 30, length_bytes=8), {1002, 1009}),
    "no UTF-8": (frame(b'{"type":"\xff"}'), {1007}),
    "no UTF-8, over two fragments": (
        frame(b'{"type":"\xc3', fin=False) + frame(b'("}', CONTINUATION),
        {1007},
    ),
    "a surrogate in UTF-8": (frame(b"\xed\xa0\x80"), {1007}),
    "HTTP in the place of a frame": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", {1002}),
    "zeros": (bytes(64), {1002}),
}


def test_invalid_frames_end_only_their_own_connection(server: ServeProcess, witness: Witness) -> None:
    for name, (data, codes) in WRONG.items():
        with connection_with_slot(server) as client:
            client.send(data)
            received = client.to_the_end()
            assert received.close_code in codes, name
            for text in received.texts:
                assert_no_leak(text)
        witness.looks()
    wait_for_a_free_slot(server)


RIGHT: dict[str, bytes] = {
    "one byte a fragment": b"".join(
        frame(bytes([byte]), CONTINUATION if place else TEXT, fin=False)
        for place, byte in enumerate(b'{"type":"state"')
    )
    + frame(b"}", CONTINUATION),
    "pings among fragments": frame(b'{"type":', fin=False)
    + frame(b"p", PING)
    + frame(b'"state"}', CONTINUATION),
    "empty fragments": frame(b"", fin=False)
    + frame(b"", CONTINUATION, fin=False)
    + frame(b'{"type":"state"}', CONTINUATION),
    "a character over two fragments": frame(b'{"type":"\xc3', fin=False) + frame(b'\xa9"}', CONTINUATION),
    "a length longer than it need be": frame(b'{"type":"state"}', length_bytes=8),
    "a pong that nobody asked for": frame(b"x", PONG) + frame(b'{"type":"state"}'),
    "binary": frame(b'{"type":"state"}', BINARY),
    "nothing": frame(b""),
    "zero bytes": frame(bytes(100)),
    "a byte order mark": frame(b'\xef\xbb\xbf{"type":"state"}'),
}


def test_unusual_valid_frames_get_one_reply_and_the_session_stays(server: ServeProcess) -> None:
    for name, data in RIGHT.items():
        with connection_with_slot(server) as client:
            client.send(data)
            reply = client.next_frame()
            while reply is not None and reply[0] == PONG:
                reply = client.next_frame()
            assert reply is not None, f"the connection has ended: {name}"
            assert_no_leak(reply[1])
            assert json.loads(reply[1])["type"] in ("state", "error"), name
            client.send(frame(json.dumps(STATE).encode()))
            after = client.next_frame()
            assert after is not None, name
            assert json.loads(after[1])["type"] == "state", name
    wait_for_a_free_slot(server)


def noise(rng: random.Random) -> bytes:
    """Return frames, most of them broken somewhere."""
    parts = []
    for _ in range(rng.randrange(1, 6)):
        payload = (
            json.dumps(rng.choice(VALID)).encode()
            if rng.random() < 0.6
            else rng.randbytes(rng.randrange(200))
        )
        part = frame(
            payload,
            rng.choice((TEXT, TEXT, TEXT, BINARY, CONTINUATION, PING, PONG, rng.randrange(16))),
            fin=rng.random() < 0.8,
            reserved=rng.choice((0, 0, 0, 0, rng.randrange(8))),
            masked=rng.random() < 0.9,
            length_bytes=rng.choice((None, None, None, 2, 8)),
        )
        if rng.random() < 0.3:
            where = rng.randrange(len(part))
            part = part[:where] + rng.randbytes(1) + part[where + 1 :]
        if rng.random() < 0.15:
            part = part[: rng.randrange(len(part))]
        parts.append(part)
    return b"".join(parts)


def test_noise_harms_no_other_session(server: ServeProcess, witness: Witness) -> None:
    for number in range(20 * EXAMPLES):
        rng = dice(number)
        data = noise(rng)
        cut = rng.randrange(len(data) + 1)
        polite = rng.random() < 0.5
        eventually(lambda data=data, cut=cut, polite=polite: _made_noise(server, data, cut, polite))
        if number % 10 == 0:
            witness.looks()
    witness.looks()
    wait_for_a_free_slot(server)


def _made_noise(server: ServeProcess, data: bytes, cut: int, polite: bool) -> bool:
    """Send noise; return False if no slot was free."""
    with RawClient(server.port) as client:
        # In pieces, so that the boundaries of reads are somewhere else than those of frames.
        client.send(data[:cut])
        client.send(data[cut:])
        if polite:  # else it goes without a word, in the middle of whatever it was
            client.send(frame(b"\x03\xe8", CLOSE))
            with suppress(OSError):
                client.connection.shutdown(socket.SHUT_WR)
            client.to_the_end()
        texts = client.heard.texts
    for text in texts:
        assert_no_leak(text)
    return not any(b"CAPACITY_REACHED" in text for text in texts)


# Messages

ODD: list[str | bytes] = [
    "[" * 200_000,
    '{"type":' * 50_000,
    '{"type":"step","data":' + '{"metadata":' * 500 + "1" + "}" * 501,
    '{"type":"step","data":{"text":"a","times":Infinity}}',
    '{"type":"step","data":{"text":"a","times":1e400}}',
    '{"type":"reset","data":{"seed":%s}}' % ("9" * 400_000),
    '{"type":"step","data":{"text":"\\ud800"}}',
    '{"type":"\\ud800"}',
    '{"type":"reset","data":{"self":1,"cls":2,"options":3}}',
    '{"type":"state","type":"nothing"}',
    '{"type":["state"]}',
    '{"type":"mcp","data":[]}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","id":1,"method":"openenv/session/close","params":{"session_id":{}}}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":7}}}',
    json.dumps({"type": "step", "data": {"text": "x" * (15 * MB)}}),
    json.dumps({"type": "x" * MB}),
    json.dumps({"type": "step", "data": {str(number): 1 for number in range(5000)}}),
    b"\xff\xfe\x00",
    "",
    '"state"',
    '[{"type":"state"}]',
    '{"type":"state"}{"type":"state"}',
    '{"type":"state"}\n\n',
    "GET / HTTP/1.1",
]


PIECES = ('"', "{", "}", "[", ":", ",", "\\", "\x00", "é", "1e999")
NAMES = ("more", "", "type", "data", "session_id", "self", "__class__")
VALUES: list[Any] = [None, True, False, 0, -1, 1e308, 10**30, "", "state", "x" * 300, "\u2028"]
VALUES += [[], [[]], {}, {"type": "state"}, [0] * 50]


def mutated_message(rng: random.Random) -> str:
    """Return the text of a valid message with something wrong in it."""
    if rng.random() < 0.5:
        return json.dumps(_mutate_value(rng, rng.choice(VALID)), ensure_ascii=rng.random() < 0.5)
    text = json.dumps(rng.choice(VALID))
    for _ in range(rng.randrange(1, 4)):
        where = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text = text[:where] + rng.choice(PIECES) + text[where:]
            case 1:
                text = text[:where] + text[where + 1 :]
            case 2:
                text = text[:where]
            case _:
                text = text[where:] + text[:where]
    return text


def _mutate_value(rng: random.Random, value: Any) -> Any:
    """Return JSON with one random value replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(NAMES)] = rng.choice(VALUES)
            case _:
                changed[key] = _mutate_value(rng, value[key])
        return changed
    return rng.choice(VALUES)


class Model:
    """The expected state of a session, from its requests and replies."""

    def __init__(self) -> None:
        self.steps = 0

    def after(self, sent: str | bytes, reply: bytes) -> None:
        assert_no_leak(reply)
        answer = json.loads(reply)
        assert set(answer) == {"type", "data"}
        match answer["type"]:
            case "error":
                assert set(answer["data"]) >= {"message", "code"}
                assert answer["data"]["code"] in ("INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR")
            case "observation":
                assert isinstance(sent, str)
                request_type = json.loads(sent)["type"]
                self.steps = 0 if request_type == "reset" else self.steps + 1
                assert answer["data"]["observation"]["turn"] == self.steps
            case "state":
                assert answer["data"]["step_count"] == self.steps
            case kind:
                assert kind == "mcp"
                assert set(answer["data"]) == {"jsonrpc", "id", "error"} or "result" in answer["data"]


def send_and_check(client: ClientConnection, model: Model, message: str | bytes) -> None:
    model.after(message, exchange(client, message))
    model.after(json.dumps(STATE), exchange(client, json.dumps(STATE)))


def test_every_odd_message_gets_one_reply_and_the_session_stays(
    server: ServeProcess, witness: Witness
) -> None:
    rng = dice()
    model = Model()
    with session(server) as client:
        for message in ODD:
            send_and_check(client, model, message)
        witness.looks()
        for _ in range(100 * EXAMPLES):
            send_and_check(client, model, mutated_message(rng))
        witness.looks()
    wait_for_a_free_slot(server)


def test_every_mutated_tool_request_gets_one_reply(server: ServeProcess) -> None:
    rng = dice()
    with session(server, "/mcp") as client:
        for _ in range(20 * EXAMPLES):
            message = mutated_message(rng) if rng.random() < 0.5 else json.dumps(_mutate_value(rng, RPC))
            reply = exchange(client, message)
            assert_no_leak(reply)
            answer = json.loads(reply)
            assert set(answer) == {"jsonrpc", "id", "error"} or set(answer) == {"jsonrpc", "id", "result"}
    wait_for_a_free_slot(server)
