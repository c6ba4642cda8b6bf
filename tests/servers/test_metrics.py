"""/metrics: every metric compared with the requests that the test made, for one worker and for two."""

import asyncio
import json
import re
import time
from collections import Counter as Tally
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from counter import LIMIT, BlockingCounter, Counter
from mcp.shared.exceptions import MCPError
from mcp_hosts import host
from prometheus_client.parser import text_string_to_metric_families
from serve_process import eventually, serve
from server_apps import EVERY_WAY, HEADER, action, app_of, mcp, step
from serving import request, serving, socket_to
from toolbox import toolbox_app
from websockets.asyncio.client import ClientConnection, connect

from openenv_core import ConfigurationError
from openenv_core.protocol.batch import SUBPROTOCOL
from rl_bridge.metrics.status import encode_metrics
from servers.metrics import CALLS, CODES
from servers.settings import ServerSettings
from tests.rl_bridge.metrics.status_fixtures import snapshot

TOKEN = "correct-horse-battery-staple"
PATIENT: dict[str, Any] = {"open_timeout": 60}  # a worker may be starting
Samples = dict[tuple[str, tuple[str, ...]], float]


async def scrape(address: str, **headers: str) -> Samples:
    """Return the samples by name and label values, without the label of the environment."""
    reply = await request(address, "GET", "/metrics", headers=headers)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (
            sample.name,
            tuple(value for name, value in sample.labels.items() if name != "environment"),
        ): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


@dataclass
class ExpectedMetrics:
    """The values that the metrics should have."""

    calls: Tally[str] = field(default_factory=Tally)
    codes: Tally[str] = field(default_factory=Tally)
    sessions: int = 0
    received: int = 0
    sent: int = 0

    def agrees(self, samples: Samples) -> bool:
        called = {name: samples["ropewalk_call_seconds_count", (name,)] for name in CALLS}
        errors = {code: samples["ropewalk_errors_total", (code,)] for code in CODES}
        return (
            called == {name: self.calls[name] for name in CALLS}
            and errors == {code: self.codes[code] for code in CODES}
            and samples["ropewalk_sessions_opened_total", ()] == self.sessions
            and samples["ropewalk_queue_wait_seconds_count", ()] == self.sessions
            and samples["ropewalk_received_bytes_total", ()] == self.received
            and samples["ropewalk_sent_bytes_total", ()] == self.sent
        )

    async def ask(
        self, socket: ClientConnection, frame: dict[str, Any], call: str = "", code: str = ""
    ) -> Any:
        text = json.dumps(frame, ensure_ascii=False)
        await socket.send(text)
        reply = await socket.recv()
        self.received += len(text.encode())
        self.sent += len(reply.encode() if isinstance(reply, str) else reply)
        self.calls[call] += bool(call)
        self.codes[code] += bool(code)
        return reply

    async def post(
        self, address: str, path: str, body: Any, session: str, call: str = "", code: str = ""
    ) -> None:
        content = json.dumps(body)
        reply = await request(address, "POST", path, content, {HEADER: session})
        self.received += len(content)
        self.sent += len(reply.content)
        self.calls[call] += bool(call)
        self.codes[code] += bool(code)


async def play(address: str, expected: ExpectedMetrics) -> None:
    """Send every kind of request that is counted; every session ends."""
    async with socket_to(address, **PATIENT) as socket:  # the released dialect
        expected.sessions += 1
        await expected.ask(socket, {"type": "reset", "data": {"episode_id": "née"}}, "reset")
        for _ in range(LIMIT // 2):
            await expected.ask(socket, step(), "step")
        await expected.ask(socket, {"type": "state"})
        await expected.ask(socket, step(), code="EXECUTION_ERROR")
        await expected.ask(socket, step(13), code="VALIDATION_ERROR")
        await expected.ask(socket, {"type": "dance"}, code="UNKNOWN_TYPE")
        await expected.ask(socket, {"type": "mcp", "data": mcp("dance")}, code="-32601")
    async with connect(
        f"ws://{address}/ws", subprotocols=[SUBPROTOCOL], proxy=None, compression=None, **PATIENT
    ) as socket:
        expected.sessions += 2
        await expected.ask(socket, {"id": 1, "op": "open", "count": 2})
        await expected.ask(socket, {"id": 2, "op": "reset", "options": {"episode_id": "née"}})
        expected.calls["reset"] += 2
        await expected.ask(socket, {"id": 3, "op": "state"})
        actions = [{"amount": 2}, {"amount": 13}]
        await expected.ask(socket, {"id": 4, "op": "step", "actions": actions}, "step", "VALIDATION_ERROR")
        await expected.ask(socket, {"id": 5, "op": "dance"}, code="UNKNOWN_TYPE")
        await expected.ask(socket, {"id": 6, **step(), "member": 1}, "step")
        await expected.ask(socket, {"id": 7, **step(), "member": 2}, code="VALIDATION_ERROR")
        await expected.ask(socket, {"id": 8, **step(), "deadline_s": 60.0}, "step")
    expected.sessions += 1
    await expected.post(address, "/reset", {}, "plain", "reset")
    await expected.post(address, "/step", action(), "plain", "step")
    await expected.post(address, "/step", action(13), "plain", code="VALIDATION_ERROR")
    await expected.post(address, "/step", action(), "unknown", code="SESSION_ERROR")
    await expected.post(address, "/mcp", mcp("openenv/session/close", session_id="plain"), "plain")


def adds_up(samples: Samples) -> None:
    """Check the invariants between metrics."""
    for call in CALLS:
        buckets = [
            value for (name, of), value in samples.items() if name.endswith("_bucket") and of[0] == call
        ]
        assert buckets == sorted(buckets)
        assert buckets[-1] == samples["ropewalk_call_seconds_count", (call,)]
        parts = ("ropewalk_environment_seconds_total", "ropewalk_server_seconds_total")
        there, here = (samples[name, (call,)] for name in parts)
        assert there >= 0
        assert here >= 0
        assert (there > 0) is (here > 0) is (buckets[-1] > 0)
    steps = sum(value for (name, _), value in samples.items() if name == "ropewalk_worker_steps_total")
    assert steps == samples["ropewalk_call_seconds_count", ("step",)]


async def until(address: str, condition: Callable[[Samples], bool]) -> Samples:
    """Scrape, each time on a connection of its own, until a condition holds; a worker publishes twice a second."""
    async with asyncio.timeout(60):
        while True:
            with suppress(httpx.TransportError):  # of a worker that has just been killed
                if condition(samples := await scrape(address)):
                    return samples
            await asyncio.sleep(0.02)


def taken(samples: Samples) -> list[float]:
    return sorted(value for (name, _), value in samples.items() if name == "ropewalk_slots_in_use")


@EVERY_WAY
async def test_every_metric_matches_the_requests_made(env: Any) -> None:
    expected = ExpectedMetrics()
    async with serving(app_of(env)) as address:
        await play(address, expected)
        samples = await scrape(address)
        adds_up(samples)
        assert expected.agrees(samples)
        assert samples["ropewalk_slots", ()] == 4
        await until(address, lambda samples: taken(samples) == [0])


@pytest.mark.slow
async def test_any_worker_reports_all_workers_and_a_restarted_one_keeps_its_counts() -> None:
    expected = ExpectedMetrics()
    with serve("--workers", "2") as server:
        async with asyncio.timeout(60):
            while True:  # until each of the workers, which the kernel picks, has played
                await play(server.address, expected)
                adds_up(samples := await until(server.address, expected.agrees))
                if all(samples["ropewalk_worker_steps_total", (str(n),)] for n in range(2)):
                    break
        for _ in range(8):
            adds_up(await until(server.address, expected.agrees))
        await until(server.address, lambda samples: taken(samples) == [0, 0])
        async with socket_to(server.address) as socket:
            expected.sessions += 1
            await expected.ask(socket, {"type": "reset"}, "reset")
            assert taken(await until(server.address, expected.agrees)) == [0, 1]
        supervisor = psutil.Process(server.process.pid)
        killed = supervisor.children()[0]
        killed.kill()
        kept_on = {one.pid for one in supervisor.children()} - {killed.pid}
        eventually(lambda: len({one.pid for one in supervisor.children()} - {killed.pid} - kept_on) == 1)
        await until(server.address, expected.agrees)
        await play(server.address, expected)
        await until(server.address, expected.agrees)


class Sleeper(BlockingCounter):
    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


@pytest.mark.parametrize("blocking", [False, True])
async def test_time_in_the_environment_is_measured_apart(blocking: bool) -> None:
    env = type("Sleeper", (Sleeper,), {"BLOCKING": blocking})
    async with (
        serving(app_of(env)) as address,
        connect(f"ws://{address}/ws", subprotocols=[SUBPROTOCOL], proxy=None) as socket,
    ):
        expected = ExpectedMetrics()
        await expected.ask(socket, {"id": 1, "op": "open", "count": 3})
        await expected.ask(socket, {"id": 2, "op": "reset"})
        await expected.ask(socket, {"id": 3, "op": "step", "actions": [{"amount": 1}] * 3})
        await expected.ask(socket, {"id": 4, **step(1)})
        samples = await scrape(address)
        total, there, here = (
            samples[f"ropewalk_{name}", ("step",)]
            for name in ("call_seconds_sum", "environment_seconds_total", "server_seconds_total")
        )
        assert there >= 4 * 0.02
        assert here > 0
        # Each of the three had the answer when the last one was through; what one waits for another is neither.
        assert total - there - here >= (2 * 3 * 0.02 if not blocking else -1e-9)


async def test_waiting_clients_are_counted() -> None:
    async with serving(app_of(Counter, cap=1, max_wait_s=60.0)) as address, socket_to(address) as first:
        await ExpectedMetrics().ask(first, {"type": "reset"})
        async with connect(f"ws://{address}/ws", subprotocols=[SUBPROTOCOL], proxy=None) as second:
            await second.send('{"id": 1, "op": "open"}')
            await second.recv()
            samples = await scrape(address)
            assert samples["ropewalk_queue_waiting", ()] == 1
            assert samples["ropewalk_slots_in_use", ("0",)] == samples["ropewalk_slots", ()] == 1
            await first.close()
            while b'"last":true' not in (await second.recv()).encode():
                pass
            samples = await scrape(address)
            assert samples["ropewalk_queue_waiting", ()] == 0
            assert samples["ropewalk_queue_wait_seconds_count", ()] == 2
            assert samples["ropewalk_queue_wait_seconds_sum", ()] > 0


async def test_tool_calls_are_counted_over_every_route() -> None:
    async with serving(toolbox_app()) as address:
        session = (await request(address, "POST", "/mcp", mcp("openenv/session/create"))).json()["result"]
        call = mcp("tools/call", name="bump", arguments={}, **session)
        assert (await request(address, "POST", "/mcp", call)).status_code == 200
        async with host(address) as standard:
            await standard.call_tool("bump", {})
            await standard.call_tool("think", {})
            with pytest.raises(MCPError):
                await standard.call_tool("no such tool", {})
        samples = await scrape(address)
        adds_up(samples)
        assert samples["ropewalk_call_seconds_count", ("tool",)] == 3  # beside the unknown one
        assert samples["ropewalk_errors_total", ("-32602",)] == 1


async def test_metrics_need_the_token_and_can_be_switched_off() -> None:
    async with serving(app_of(Counter, tokens=(TOKEN,))) as address:
        assert (await request(address, "GET", "/metrics")).status_code == 401
        assert (
            await request(address, "POST", "/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        ).status_code == 405
        assert await scrape(address, authorization=f"Bearer {TOKEN}")
        openmetrics = {
            "authorization": f"Bearer {TOKEN}",
            "accept": "application/openmetrics-text; version=1.0.0",
        }
        assert (await request(address, "GET", "/metrics", headers=openmetrics)).text.endswith("# EOF\n")
    assert ServerSettings.from_environment({"ROPEWALK_METRICS": "off"}).metrics is False
    with pytest.raises(ConfigurationError, match="ROPEWALK_METRICS to be 1 or 0"):
        ServerSettings.from_environment({"ROPEWALK_METRICS": "maybe"})
    async with serving(app_of(Counter, metrics=False)) as address:
        await play(address, ExpectedMetrics())
        assert (await request(address, "GET", "/metrics")).status_code == 404


async def test_dashboard_uses_exactly_the_exported_metrics() -> None:
    board = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in board["templating"]["list"]]
    async with serving(app_of(Counter)) as address:
        exposition = (await request(address, "GET", "/metrics")).text + encode_metrics(snapshot()).decode()
    families = [*text_string_to_metric_families(exposition)]
    exported = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    named = {name for text in queries for name in re.findall(r"\bropewalk_\w+", text)}
    assert named <= exported.keys()
    assert {family.name for family in families} <= {
        re.sub("_(total|bucket|count|sum)$", "", name) for name in named
    }
    for text in queries:
        for name, labels in re.findall(r"\b(ropewalk_\w+)\{(.*?)\}", text):
            assert set(re.findall(r"(\w+)[=!]", labels)) <= exported[name], text
