"""`ropewalk serve` from outside: whom it lets in, what it prints, how it ends. Real processes, really signalled."""

import asyncio
import json
import signal
import socket
from pathlib import Path

import pytest
from serve_process import eventually, gone, refusal, serve
from serving import ask, socket_to

TOKEN = "correct-horse-battery-staple"


def test_every_route_wants_the_token_and_the_log_never_shows_it(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# of the trainer\n{TOKEN}\n\nanother-token-of-good-length\n")
    with serve("--token-file", str(tokens), "--log-level", "debug") as server:
        for path in ("/health", "/docs", "/openapi.json", "/metadata"):
            assert server.get(path)[0] == 401
        assert server.request("POST", "/mcp", {})[0] == 401
        assert server.get("/health", Authorization=f"Bearer {TOKEN}") == (200, {"status": "healthy"})
        with server.connect() as connection:
            connection.sendall(
                b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n"
                b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")
    assert server.output
    assert TOKEN not in server.output


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (("--token", TOKEN, "--token", "another-token-of-good-length"), {}),
        ((), {"ROPEWALK_TOKENS": f"another-token-of-good-length, {TOKEN}"}),
        (("--token", TOKEN), {"ROPEWALK_TOKENS": "a-token-that-options-outrank"}),
    ],
)
def test_tokens_come_from_options_or_the_environment(words: tuple[str, ...], environ: dict[str, str]) -> None:
    with serve(*words, **environ) as server:
        assert server.get("/health")[0] == 401
        assert server.get("/health", Authorization=f"Bearer {TOKEN}")[0] == 200
        outranked = server.get("/health", Authorization="Bearer a-token-that-options-outrank")
        assert outranked[0] == 401


def test_tokens_are_not_in_the_environment_that_an_app_sees() -> None:
    with serve(app="tell_environ:app", ROPEWALK_TOKENS=TOKEN) as server:
        status, said = server.get("/", Authorization=f"Bearer {TOKEN}")
        assert status == 200
        assert TOKEN not in said
        assert "PATH" in said


def test_a_stranger_must_not_come_in_without_a_token() -> None:
    status, said = refusal("--host", "0.0.0.0")
    assert status == 2
    for word in ("expected a token", "--token-file", "ROPEWALK_TOKENS", "--insecure", "secrets"):
        assert word in said
    status, said = refusal("--host", "::")
    assert (status, "expected a token" in said) == (2, True)


def test_an_inherited_socket_is_looked_at_too() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        status, said = refusal("--fd", str(listener.fileno()), pass_fds=(listener.fileno(),))
    assert (status, "expected a token" in said) == (2, True)


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (("--insecure",), {}),
        ((), {"ROPEWALK_INSECURE": "1"}),
        (("--token", TOKEN), {}),
    ],
)
def test_beyond_loopback_where_it_was_chosen(words: tuple[str, ...], environ: dict[str, str]) -> None:
    with serve("--host", "0.0.0.0", *words, **environ) as server:
        assert server.get("/health", Authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--token", "short"), "at least 16 printable ASCII characters"),
        (("--token-file", "/no/such/file"), "--token-file"),
        (("--max-sessions", "0"), "--max-sessions"),
        (("--step-timeout", "soon"), "--step-timeout"),
        (("--allowed-host", "https://example.org"), "allowed host"),
        (("--allowed-origin", "example.org"), "allowed origin"),
        (("--fd", "987"), "--fd"),
    ],
)
def test_what_cannot_be_used_is_refused(words: tuple[str, ...], text: str) -> None:
    status, said = refusal(*words)
    assert status == 2
    assert text in said
    assert "Traceback" not in said
    assert "short" not in said


@pytest.mark.parametrize("app", ["json:loads", "json:JSONDecoder", "json:__name__", "counter:Counter"])
def test_what_is_no_app_is_refused(app: str) -> None:
    status, said = refusal(app=app)
    assert status == 2
    assert "expected an ASGI app" in said


def test_a_foreign_app_is_guarded() -> None:
    with serve("--token", TOKEN, app="tell_environ:app") as server:
        assert server.get("/")[0] == 401
        assert server.get("/", Authorization=f"Bearer {TOKEN}", Host="rebound.example.com")[0] == 421
        assert server.get("/", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_foreign_app_takes_no_options_that_it_cannot_heed() -> None:
    status, said = refusal("--max-sessions", "3", app="tell_environ:app")
    assert status == 2
    assert "--max-sessions" in said


async def test_sessions_print_nothing() -> None:
    with serve() as server:
        before = server.output
        async with socket_to(server.address) as client:
            await ask(client, {"type": "reset"})
        assert server.get("/health")[0] == 200
    assert server.output == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_under_load_leaves_nothing_behind(number: signal.Signals) -> None:
    with serve() as server:
        family = server.family
        stop = asyncio.Event()

        async def play() -> None:
            async with socket_to(server.address) as client:
                await ask(client, {"type": "reset"})
                while not stop.is_set():
                    await ask(client, {"type": "state"})

        players = [asyncio.create_task(play()) for _ in range(16)]
        await asyncio.sleep(0.1)
        server.process.send_signal(number)
        assert await asyncio.to_thread(server.ended) == 0
        stop.set()
        await asyncio.gather(*players, return_exceptions=True)
        assert all(gone(process) for process in family)
    assert "Traceback" not in server.output


async def test_a_step_that_hangs_does_not_keep_the_server() -> None:
    with serve("--drain", "0.5", app="hanging:app") as server:
        async with socket_to(server.address) as client:
            await client.send(json.dumps({"type": "step", "data": {"amount": 1}}))
            eventually(lambda: "hanging now" in server.output)
            server.process.terminate()
            assert await asyncio.to_thread(server.ended) == 0


async def test_a_second_interrupt_ends_at_once() -> None:
    with serve("--drain", "3600", app="tell_environ:app") as server, server.connect() as connection:
        connection.sendall(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: "hanging now" in server.output)
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert server.process.poll() is None  # it waits for the response
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.ended) == 0


def test_a_canary_in_the_environment_is_never_told() -> None:
    canary = "canary-4f1c9d-of-the-operator"
    with serve("--log-level", "debug", CANARY=canary) as server:
        for path in ("/metadata", "/schema", "/openapi.json", "/health", "/no/such/route"):
            assert canary not in json.dumps(server.get(path)[1])
        for body in ({"action": {"amount": 13}}, {"action": {"amount": "x"}}, ["no object"], {"action": {}}):
            assert canary not in json.dumps(server.request("POST", "/step", body)[1])
    assert canary not in server.output
