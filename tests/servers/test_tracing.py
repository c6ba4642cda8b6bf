"""One trace per episode, from the client through a real server to its environment; nothing when it is off."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from counter import LIMIT, Add, Counter
from counter_client import CounterEnv
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recorded_spans import collector, lines, recorded, recorded_spans, request
from serve_process import SUPPORT, eventually, serve
from server_apps import EVERY_WAY, app_of
from serving import serving
from test_workers import session_ids_of_workers
from v1_frames import validated_frames

from openenv_core import ConfigurationError, ValidationFailedError, tracing

__all__ = ["validated_frames"]


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    with recorded_spans() as exporter:
        yield exporter


@EVERY_WAY
@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_a_trace_shows_every_step_of_its_episode(
    env: Any, transport: str, exporter: InMemorySpanExporter, validated_frames: list[int]
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
        left = time.time_ns()  # the episode's end is what was last asked of it, whenever its client says so
    first_spans = ["episode", *request("reset")]
    refused = ["episode > step"]  # before it comes to the environment
    assert lines(recorded(exporter)) == [
        [*first_spans, *(LIMIT // 2) * request("step")],
        [*first_spans, *request("step"), *refused],
    ]
    assert max(span.end for span in recorded(exporter) if span.name == "episode") <= left
    assert bool(validated_frames[0]) is (transport == "websocket")
    spans = exporter.get_finished_spans()
    attributes = [dict(span.attributes or {}) for span in spans if span.name == "step"]
    assert [(one.get("ropewalk.done"), one.get("ropewalk.reward")) for one in attributes] == [
        *(LIMIT // 2 - 1) * [(False, 1)],
        (True, 1),
        (False, 1),
        (None, None),
    ]
    failed = [span.name for span in spans if span.status.status_code is trace.StatusCode.ERROR]
    assert failed == ["step"]
    served = [span.attributes for span in spans if span.name.startswith("serve")]
    assert all(of is not None and of["ropewalk.environment"] == "counter" for of in served)


def test_request_that_does_not_come_to_the_environment_has_no_time_in_it(
    exporter: InMemorySpanExporter,
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    former = SimpleNamespace(spent_s=5.0)
    with (
        pytest.raises(OverflowError),
        tracing.served_span(parent, "step", "counter", former, time.perf_counter()),
    ):
        raise OverflowError
    (served,) = exporter.get_finished_spans()
    assert served.status.status_code is trace.StatusCode.ERROR
    assert f"{served.context.trace_id:x}" in parent


async def test_an_episode_is_a_part_of_what_it_is_played_in(exporter: InMemorySpanExporter) -> None:
    def play(address: str) -> None:
        with tracing.traced("rollout", seed=1), CounterEnv(f"http://{address}").sync() as client:
            client.reset()

    async with serving(app_of(Counter)) as address:
        await asyncio.to_thread(play, address)
    (found,) = lines(recorded(exporter))
    assert found == ["rollout", "rollout > episode", *request("reset", "rollout > episode")]


PLAY = """
import asyncio, os, sys
from counter import Add, Counter
from counter_client import CounterEnv
from server_apps import app_of
from serving import serving
from openenv_core import tracing

async def play(url, *sessions):
    for session in sessions:
        async with CounterEnv(url, session_id=session) as client:
            await client.reset(seed=0)
            for _ in range(3):
                await client.step(Add(amount=1))

async def main(*words):
    if words:
        await play(*words)
    else:
        async with serving(app_of(Counter)) as address:
            await play(f"http://{address}", None)

asyncio.run(main(*sys.argv[1:]))
asyncio.run(tracing.flush())
print([name for name in ("opentelemetry.sdk", "prometheus_client") if name in sys.modules], flush=True)
os._exit(0)
"""


def play(*words: str, **environ: str) -> str:
    """Play in a new process, which serves itself without arguments; return the modules it has loaded."""
    environ |= {"PYTHONPATH": f"{SUPPORT}:{SUPPORT}/../servers:{SUPPORT}/../.."}
    command = [sys.executable, "-c", PLAY, *words]
    return subprocess.run(
        command, check=True, timeout=120, env=environ, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


@pytest.mark.slow
def test_processes_send_their_spans_to_a_collector() -> None:
    with collector() as (endpoint, taken):
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        with serve("--workers", "2", **environ, OTEL_SERVICE_NAME="served") as server:
            url, sessions = f"http://{server.address}", session_ids_of_workers("traced") * 2
            for session in sessions:  # a connection may come to the worker that passes it on to the session's
                assert server.request("POST", "/reset", {}, X_OpenEnv_Session=session)[0] == 200
            assert play(url, *sessions, **environ, OTEL_SERVICE_NAME="player") == "['opentelemetry.sdk']"
        episode = ["episode", *request("reset"), *3 * request("step")]
        eventually(lambda: len(taken) >= len(sessions) * len(episode))  # at the latest as the processes end
    assert lines(taken) == len(sessions) * [episode]
    assert {span.service for span in taken if " " in span.name} == {"served"}
    assert {span.service for span in taken if " " not in span.name} == {"player"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none", "OTEL_SERVICE_NAME=x"]
)
def test_nothing_is_imported_where_tracing_is_off(variable: str) -> None:
    name, _, value = variable.partition("=")
    endpoint = {} if value == "x" else {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert play(**endpoint, **{name: value}) == "[]"


@pytest.mark.parametrize(
    ("environ", "missing", "text"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
            "opentelemetry",
            r"pip install 'ropewalk\[otel\]'",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "opentelemetry.sdk.trace", r"pip install 'ropewalk\[otel\]'"),
        ({"OTEL_TRACES_EXPORTER": "nowhere"}, "none", "OTEL_TRACES_EXPORTER to name .* got 'nowhere'"),
    ],
)
def test_missing_package_is_reported_with_its_extra(
    environ: dict[str, str], missing: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, missing, None)
    tracing.tracer.cache_clear()
    with pytest.raises(ConfigurationError, match=text):
        CounterEnv("http://127.0.0.1:1")
