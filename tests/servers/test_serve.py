"""`ropewalk serve` from outside: access, output, shutdown. Real processes and signals."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fuzzwire import HANDSHAKE
from serve_process import SUPPORT, WAIT_TIMEOUT_S, eventually, gone, run_refused_server, serve
from server_apps import mcp, step
from serving import ask, socket_to

from openenv_core.cli.main import main

TOKEN = "correct-horse-battery-staple"
OTHER = "another-token-of-good-length"
REFUSAL = "expected a better place, got this one; go elsewhere"
"""What `lifelong` says where it is told to refuse."""

soak = pytest.mark.soak
slow = pytest.mark.slow


def test_served_routes_require_the_token_and_reveal_no_secret(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# of the trainer\n{TOKEN}\n\n{OTHER}\n")
    canary = "canary-4f1c9d-of-the-operator"
    with serve("--token-file", str(tokens), "--log-level", "debug", CANARY=canary) as server:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/health", "/docs", "/openapi.json", "/metadata"):
            assert server.get(path)[0] == 401
        assert server.request("POST", "/mcp", {})[0] == 401
        assert server.get("/health", **bearer) == (200, {"status": "healthy"})
        with server.connect() as connection:
            authorization = f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
            connection.sendall(HANDSHAKE.removesuffix(b"\r\n") % b"/ws" + authorization)
            assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")
        for path in ("/metadata", "/schema", "/openapi.json", "/health", "/no/such/route"):
            assert canary not in json.dumps(server.get(path, **bearer)[1])
        for body in ({"action": {"amount": 13}}, {"action": {"amount": "x"}}, ["no object"], {"action": {}}):
            assert canary not in json.dumps(server.request("POST", "/step", body, **bearer)[1])
    assert server.output
    assert TOKEN not in server.output
    assert canary not in server.output


@pytest.mark.parametrize("options", [(), pytest.param(("--reload",), marks=soak)])
def test_foreign_app_is_guarded_and_does_not_see_the_tokens(options: tuple[str, ...]) -> None:
    with serve(*options, app="tell_environ:app", ROPEWALK_TOKENS=f"{OTHER}, {TOKEN}") as server:
        assert server.get("/")[0] == 401
        assert server.get("/", Authorization=f"Bearer {TOKEN}", Host="rebound.example.com")[0] == 421
        status, environment_text = server.get("/", Authorization=f"Bearer {TOKEN}")
        assert status == 200
        assert TOKEN not in environment_text
        assert "ROPEWALK_RELOAD" not in environment_text
        assert "PATH" in environment_text
        assert TOKEN not in " ".join(word for process in server.family for word in process.cmdline())


@pytest.mark.slow
def test_event_loop_is_uvloop_where_installed(tmp_path: Path) -> None:
    with serve(app="tell_environ:app") as server:
        assert server.get("/loop") == (200, "uvloop")
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError('on purpose')")
    with serve(app="tell_environ:app", PYTHONPATH=str(tmp_path)) as server:
        assert server.get("/loop") == (200, "asyncio")
    assert server.process.returncode == 0


@slow
def test_tokens_of_options_replace_those_of_the_environment() -> None:
    with serve("--token", TOKEN, "--host", "0.0.0.0", ROPEWALK_TOKENS=OTHER) as server:
        assert server.get("/health")[0] == 401
        assert server.get("/health", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert server.get("/health", Authorization=f"Bearer {OTHER}")[0] == 401


def test_public_addresses_require_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::"):
        assert main(["serve", "counter:app", "--port", "0", "--host", host]) == 2
        errors = capsys.readouterr().err
        for word in ("expected a token", "--token-file", "ROPEWALK_TOKENS", "--insecure", "secrets"):
            assert word in errors
    with socket.create_server(("0.0.0.0", 0)) as listener:  # an inherited socket is looked at too
        assert main(["serve", "counter:app", "--fd", str(os.dup(listener.fileno()))]) == 2
    assert "expected a token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--token", "short"), "at least 16 printable ASCII characters"),
        (("--token-file", "/no/such/file"), "--token-file"),
        (("--max-sessions", "0"), "--max-sessions"),
        (("--step-timeout", "soon"), "--step-timeout"),
        (("--fd", "987"), "--fd"),
        (("--reload", "--fd", "3"), "expected --reload without --fd"),
        (("--reload", "--workers", "2"), "expected --reload without --workers"),
        (("--reload", "--host", "0.0.0.0"), "expected a token"),
        (("--reload", "--reload-dir", "/no/such/folder"), "expected --reload-dir to name a folder"),
        (("--reload-dir", "."), "--reload-dir is given without --reload"),
        (("--mcp-single-session", "--workers", "2"), "on loopback with one worker, got 2 workers"),
        (
            ("--mcp-single-session", "--host", "0.0.0.0", "--insecure"),
            "got an address that other machines reach",
        ),
    ],
)
def test_invalid_options_are_refused(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["serve", "counter:app", "--port", "0", *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert "short" not in errors


@pytest.mark.parametrize(
    ("app", "options", "text"),
    [
        # It cannot heed them.
        pytest.param("tell_environ:app", "--max-sessions 3", "--max-sessions", marks=slow),
        pytest.param("counter:app", "--allowed-host https://example.org", "allowed host", marks=soak),
        pytest.param("counter:app", "--allowed-origin example.org", "allowed origin", marks=soak),
        pytest.param("solo:app", "--workers 2 --max-sessions 3", "SUPPORTS_CONCURRENT_SESSIONS", marks=soak),
        pytest.param("tell_environ:app", "--workers 2", "create_app", marks=soak),
        pytest.param("no_such_module:app", "--workers 2", "no_such_module", marks=soak),
    ],
)
def test_options_that_the_app_cannot_support_are_refused(app: str, options: str, text: str) -> None:
    status, output = run_refused_server(*options.split(), app=app)
    assert (status, text in output, "Traceback" in output) == (2, True, False)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ((), signal.SIGTERM),
        pytest.param((), signal.SIGINT, marks=slow),
        pytest.param((), signal.SIGHUP, marks=soak),
        pytest.param(("--workers", "2"), signal.SIGTERM, marks=soak),
        pytest.param(("--workers", "2"), signal.SIGINT, marks=soak),
    ],
)
async def test_sessions_log_nothing_and_a_signal_under_load_leaves_nothing_behind(
    options: tuple[str, ...], number: signal.Signals
) -> None:
    with serve(*options) as server:
        family, before = server.family, server.output
        listening = {c.laddr for p in family for c in p.net_connections() if c.status == "LISTEN"}
        assert listening == {("127.0.0.1", server.port)}  # by default nobody else can come in
        unix = {str(c.laddr) for p in family for c in p.net_connections("unix")}
        private = {Path(path).parent for path in unix if path.endswith(".sock")}  # of the workers
        assert len(private) == bool(options)
        playing = asyncio.Semaphore(0)

        async def play() -> None:
            async with socket_to(server.address) as client:
                await ask(client, {"type": "reset"})
                playing.release()
                while True:
                    await ask(client, {"type": "state"})

        players = [asyncio.create_task(play()) for _ in range(16)]
        for _ in players:
            await playing.acquire()
        assert server.output == before
        server.process.send_signal(number)
        assert await asyncio.to_thread(server.ended) == 0
        await asyncio.gather(*players, return_exceptions=True)
        assert all(gone(process) for process in family)
        assert not any(folder.exists() for folder in private)
    assert "Traceback" not in server.output


@pytest.mark.parametrize(
    "options", [pytest.param((), marks=slow), pytest.param(("--workers", "2"), marks=soak)]
)
async def test_hanging_step_does_not_block_the_shutdown(options: tuple[str, ...]) -> None:
    with serve(*options, "--drain", "0.5", app="hanging:app") as server:
        family = server.family
        async with socket_to(server.address) as client:
            await client.send(json.dumps(step()))
            eventually(lambda: "hanging now" in server.output)
            server.process.terminate()
            assert await asyncio.to_thread(server.ended) == 0
        assert all(gone(process) for process in family)


@slow
async def test_second_interrupt_ends_at_once() -> None:
    with serve("--drain", "3600", app="tell_environ:app") as server, server.connect() as connection:
        connection.sendall(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: "hanging now" in server.output)
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert server.process.poll() is None  # it waits for the response
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.ended) == 0


@slow
def test_abandoned_sessions_free_their_slots_after_the_idle_timeout() -> None:
    with serve("--max-sessions", "2", "--idle-timeout", "1.5", "--max-wait", "0") as server:

        def created() -> bool:
            return "result" in server.request("POST", "/mcp", mcp("openenv/session/create"))[1]

        assert created()
        assert created()
        error = server.request("POST", "/mcp", mcp("openenv/session/create"))[1]["error"]
        assert error["code"] == -32000
        assert error["data"] == {"active_sessions": 2, "max_sessions": 2}
        eventually(created)


@slow
@pytest.mark.parametrize(
    ("app", "threads"),
    # Threads are as many as calls have been under way at once, and the sessions are asked one by one.
    [("fuzz_app:app", 0), ("fuzz_app:in_threads", 8)],
)
async def test_sessions_share_threads(app: str, threads: int) -> None:
    with serve("--max-sessions", "64", app=app) as server:
        process = psutil.Process(server.process.pid)
        before = process.num_threads()
        sessions = [socket_to(server.address) for _ in range(64)]
        clients = [await session.__aenter__() for session in sessions]
        try:
            for client in clients:
                reply = await ask(client, {"type": "step", "data": {"text": "a"}})
                assert reply["type"] == "observation"
            assert process.num_threads() - before <= threads
        finally:
            for session in sessions:
                await session.__aexit__(None, None, None)


# What lives as long as an app


def lines(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


@pytest.mark.parametrize(
    ("options", "environ", "started"),
    [
        pytest.param((), {}, ["start exposed=False"], marks=soak),
        pytest.param(("--host", "0.0.0.0"), {"ROPEWALK_INSECURE": "1"}, ["start exposed=True"], marks=slow),
        pytest.param(("--reload",), {}, ["start exposed=False"], marks=soak),
        pytest.param(
            ("--workers", "2", "--host", "0.0.0.0", "--insecure"), {}, ["start exposed=True"] * 2, marks=soak
        ),
    ],
)
def test_lifespan_runs_once_per_process_and_knows_the_exposure(
    options: tuple[str, ...], environ: dict[str, str], started: list[str], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    with serve(*options, app="lifelong:app", NOTES=str(notes), **environ):
        eventually(lambda: len(lines(notes)) == len(started))
    assert lines(notes) == started + ["end"] * len(started)


@pytest.mark.parametrize(
    "options", [pytest.param((), marks=slow), pytest.param(("--workers", "2"), marks=soak)]
)
def test_refusing_lifespan_ends_with_a_message_and_status_2(options: tuple[str, ...], tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    status, output = run_refused_server(*options, app="lifelong:app", NOTES=str(notes), REFUSE="1")
    assert status == 2
    assert output.count(REFUSAL) == 1
    assert "Traceback" not in output
    assert "serving" not in output
    assert "end" not in lines(notes)


@soak
def test_refusing_lifespan_under_plain_uvicorn_ends_with_a_message(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    environ = {"NOTES": str(notes), "REFUSE": "1", "PATH": "", "PYTHONPATH": str(Path(SUPPORT).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "uvicorn", "lifelong:app", "--port", "0"],
        cwd=SUPPORT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT_S,
    )
    assert done.returncode != 0
    assert done.stderr.count(REFUSAL) == 1
    assert "Traceback" not in done.stderr
    assert lines(notes) == ["start exposed=None"]
