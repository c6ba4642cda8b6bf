"""`ropewalk mcp` as a child process of a desktop host, over its standard streams."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_hosts import HANDSHAKE, STATELESS, text_of
from mcp_requests import HELLO

pytestmark = pytest.mark.slow

SUPPORT = str(Path(__file__).parents[2] / "support")
ROOT = str(Path(__file__).parents[3])
START = ["-m", "openenv_core.cli", "mcp"]
WAIT_TIMEOUT_S = 30


def environ(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": ROOT, "PATH": os.environ["PATH"], **more}


class Host:
    """An MCP host that writes raw lines."""

    def __init__(self, *words: str, app: str = "toolbox:app", **more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *START, app, *words],
            cwd=SUPPORT,
            env=environ(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        return message

    def begin(self) -> None:
        self.say(HELLO)
        assert self.hear()["result"]["serverInfo"]["name"] == "toolbox"
        self.say({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def call(self, tool: str, number: int = 2, **arguments: Any) -> None:
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": number}}
        self.say({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WAIT_TIMEOUT_S)
        return self.process.returncode, out, err


@pytest.mark.parametrize("era", [HANDSHAKE, pytest.param(STATELESS, marks=pytest.mark.soak)])
async def test_host_plays_one_session(era: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    size = 10_000_000 if era == STATELESS else 100_000
    progress_values: list[float] = []

    async def progress(done: float, *_: Any) -> None:
        progress_values.append(done)

    parameters = StdioServerParameters(
        command=sys.executable,
        args=[*START, "toolbox:app", "--seed", "5"],
        cwd=SUPPORT,
        env=environ(TOOLBOX_CLOSED=str(closed)),
    )
    with (tmp_path / "log").open("w") as log:
        async with Client(stdio_client(parameters, errlog=log), mode=era) as client:
            assert text_of(await client.call_tool("bump")) == "6"
            waited = await client.call_tool("wait", {"seconds": 0}, progress_callback=progress)
            assert text_of(waited) == "waited"
            assert len(text_of(await client.call_tool("long", {"size": size}))) == size
    assert progress_values == [1]
    assert closed.exists()
    assert (tmp_path / "log").read_text() == "an environment prints what it likes\n"


@pytest.mark.slow
async def test_host_plays_a_seat(tmp_path: Path) -> None:
    parameters = StdioServerParameters(
        command=sys.executable, args=[*START, "kuhn", "--seat", "second", "--seed", "3"], env=environ()
    )
    with (tmp_path / "log").open("w") as log:
        async with Client(stdio_client(parameters, errlog=log), mode=HANDSHAKE) as client:
            tool, *_ = (await client.list_tools()).tools
            shown = text_of(await client.call_tool(tool.name, {"action": "bet"}))
    assert "You are the second player and hold K" in shown


@pytest.mark.soak
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, None])
async def test_end_of_the_host_closes_the_environment_during_a_call(
    sign: signal.Signals | None, tmp_path: Path
) -> None:
    host = Host(TOOLBOX_CLOSED=str(tmp_path / "closed"))
    host.begin()
    host.call("wait")
    assert host.hear()["method"] == "notifications/progress"
    if sign is not None:
        host.process.send_signal(sign)
    status, out, err = await asyncio.to_thread(host.ended)
    assert status == 0
    assert (tmp_path / "closed").exists()
    assert "Traceback" not in err
    assert all("jsonrpc" in json.loads(line) for line in out.splitlines())


@pytest.mark.soak
def test_hanging_call_is_reported_and_ends_the_process() -> None:
    host = Host("--step-timeout", "0.5")
    host.begin()
    host.call("wait")
    assert host.hear()["method"] == "notifications/progress"
    assert host.hear()["method"] == "notifications/message"
    assert "within 0.5 s" in host.hear()["error"]["message"]
    status, _, err = host.ended()
    assert status == 1
    assert "start toolbox again" in err


@pytest.mark.soak
def test_invalid_and_oversized_lines_are_skipped() -> None:
    host = Host(ROPEWALK_MAX_BODY_BYTES="10000")
    host.begin()
    assert host.process.stdin is not None
    host.process.stdin.write("no json\n" + "x" * 50_000 + "\n\n")
    host.call("bump")
    assert host.hear()["result"]["structuredContent"] == {"result": 1}
    assert host.ended()[0] == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("app", "options", "expected"),
    [
        ("nothing:app", (), "Could not import"),
        ("toolbox:app", ("--option", "seed"), "expected --option NAME=VALUE"),
    ],
)
def test_unusable_target_or_option_is_reported(app: str, options: tuple[str, ...], expected: str) -> None:
    status, out, err = Host(*options, app=app).ended()
    assert (status, out) == (2, "")
    assert expected in err
