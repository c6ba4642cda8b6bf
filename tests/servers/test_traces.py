"""One trace an episode: from the client through a real server to its environment; nothing where it is off."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from counter import LIMIT, Add, Counter
from counter_client import CounterEnv
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recorded_spans import lines, recorded_spans
from serve_process import SUPPORT, eventually, serve
from server_apps import EVERY_WAY, app_of
from serving import serving
from test_workers import both
from v1_frames import held_frames

from openenv_core import ConfigurationError, ValidationFailedError, tracing
from servers.routes import websocket

__all__ = ["held_frames"]


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    with recorded_spans() as exporter:
        yield exporter


def request(name: str) -> list[str]:
    to = f"episode > {name}"
    return [to, f"{to} > serve {name}", f"{to} > serve {name} > environment {name}"]


@EVERY_WAY
@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_a_trace_shows_every_step_of_its_episode(
    env: Any, transport: str, exporter: InMemorySpanExporter, held_frames: list[int]
) -> None:
    async with (
        serving(app_of(env)) as address,
        CounterEnv(f"http://{address}", transport=transport) as client,
    ):
        await client.reset(seed=0)
        while not (await client.step(Add(amount=2))).done:
            await client.state()
        await client.reset(seed=0)
        await client.step(Add(amount=1))
        with pytest.raises(ValidationFailedError):
            await client.step(Add.model_construct(amount=13))
    whole = ["episode", *request("reset"), *(LIMIT // 2) * request("step")]
    found = lines(exporter)
    assert found[0] == whole
    assert found[1][:7] == ["episode", *request("reset"), *request("step")]
    assert len(found) == 2
    assert bool(held_frames[0]) is (transport == "websocket")
    spans = exporter.get_finished_spans()
    told = [dict(span.attributes or {}) for span in spans if span.name == "step"]
    assert [(one.get("ropewalk.done"), one.get("ropewalk.reward")) for one in told][4:6] == [
        (True, 1),
        (False, 1),
    ]
    failed = [span.name for span in spans if span.status.status_code is trace.StatusCode.ERROR]
    assert failed[-1] == "step"
    assert {
        (span.attributes or {})["ropewalk.environment"] for span in spans if span.name.startswith("serve")
    } == {"counter"}


async def test_an_episode_is_a_part_of_what_it_is_played_in(exporter: InMemorySpanExporter) -> None:
    def play(address: str) -> None:
        with tracing.traced("rollout", seed=1), CounterEnv(f"http://{address}").sync() as client:
            client.reset()

    async with serving(app_of(Counter)) as address:
        await asyncio.to_thread(play, address)
    (found,) = lines(exporter)
    assert found == ["rollout", "rollout > episode", *(f"rollout > {path}" for path in request("reset"))]


async def test_a_server_that_does_not_say_so_is_sent_nothing(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "tracer", lambda: None)
    read: list[str] = []
    answer = websocket.FrameDialect.answer

    async def listening(self: Any, session: Any, text: str, *args: Any) -> Any:
        read.append(text)
        return await answer(self, session, text, *args)

    monkeypatch.setattr(websocket.FrameDialect, "answer", listening)
    async with serving(app_of(Counter)) as address, CounterEnv(f"http://{address}") as client:
        await client.reset(seed=0)
    assert lines(exporter) == [["episode", "episode > reset"]]
    assert "trace" not in read[0]


OFF = """
import asyncio, sys
from counter import Add, Counter
from counter_client import CounterEnv
from server_apps import app_of
from serving import serving

async def main():
    async with serving(app_of(Counter)) as address, CounterEnv(f"http://{address}") as client:
        await client.reset(seed=0)
        await client.step(Add(amount=1))

asyncio.run(main())
loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "prometheus_client"))
assert not loaded, loaded
"""


@pytest.mark.slow
def test_nothing_is_imported_where_it_is_off() -> None:
    environ = {"PYTHONPATH": f"{SUPPORT}:{SUPPORT}/../servers:{SUPPORT}/../.."}
    subprocess.run([sys.executable, "-c", OFF], check=True, timeout=120, env=environ)


def test_who_wants_it_without_the_package_is_told_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracing.tracer.cache_clear()
    with pytest.raises(ConfigurationError, match=r"pip install 'ropewalk\[otel\]'"):
        tracing.tracer()


@pytest.mark.slow
async def test_spans_of_workers_reach_a_collector_also_of_sessions_that_are_passed_on() -> None:
    taken: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                name = next(
                    a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                )
                taken.extend((name, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector, ThreadPoolExecutor(1) as pool:
        pool.submit(collector.serve_forever)
        environ = {
            tracing.VARIABLE: "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
            "OTEL_SERVICE_NAME": "counters",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        try:
            with recorded_spans() as exporter, serve("--workers", "2", **environ) as server:
                for session in both("traced") * 2:
                    url = f"http://{server.address}"
                    assert server.request("POST", "/reset", {}, X_OpenEnv_Session=session)[0] == 200
                    async with CounterEnv(url, session_id=session) as client:
                        await client.reset(seed=0)
                        await client.step(Add(amount=1))
                eventually(lambda: len(taken) == 16)
        finally:
            collector.shutdown()
    own = {f"{span.context.span_id:016x}": span.name for span in exporter.get_finished_spans()}
    served = [(own[span.parent_span_id.hex()], name) for name, span in taken if span.name.startswith("serve")]
    assert sorted(served) == 4 * [("reset", "counters")] + 4 * [("step", "counters")]
