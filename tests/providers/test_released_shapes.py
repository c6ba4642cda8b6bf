"""Providers of the released shapes: a stop in the middle of a start, and the wait of the container's one."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import eventually

from openenv_core import ContainerOptions, GenericEnvClient, LocalProcessProvider
from openenv_core.compat.containers import LocalDockerProvider
from openenv_core.errors import ClientClosed, ProviderError, ServerStartFailed
from openenv_core.providers.released import Released

PATIENCE_S = 20
SUPPORT = str(Path(__file__).parents[1] / "support")


class Slow:
    """A provider whose container is there when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def start_container(self, image: str = "", **options: Any) -> str:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        self.calls.append("made")
        return "http://127.0.0.1:9"

    def wait_for_ready(self, base_url: str) -> None:
        self.calls.append("waited")

    def stop_container(self) -> None:
        self.calls.append("stopped")


@pytest.mark.parametrize(
    "client",
    [
        lambda slow: GenericEnvClient(provider=slow).sync(),
        lambda slow: GenericEnvClient.from_docker_image("some:image", provider=slow),
    ],
    ids=["by itself", "told the image"],
)
async def test_a_start_that_is_cancelled_stops_what_it_has_made(client: Callable[[Slow], Any]) -> None:
    slow = Slow()
    env = client(slow)

    async def use() -> None:
        await env

    using = asyncio.create_task(use())
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert slow.calls == ["stopped"]  # by the client's end: there was nothing to stop
    slow.go.set()
    await eventually(lambda: slow.calls == ["stopped", "made", "stopped"])


async def test_a_client_that_is_closed_while_its_server_starts_waits_for_nothing() -> None:
    slow = Slow()
    env = GenericEnvClient(provider=slow)
    using = asyncio.create_task(env.reset())
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
    await env.close()
    with pytest.raises(ClientClosed, match="closed meanwhile"):
        await using
    assert slow.calls == ["stopped"]
    slow.go.set()
    await eventually(lambda: slow.calls == ["stopped", "made", "stopped"])


def test_a_client_whose_loop_has_gone_in_the_middle_of_a_start_is_closed_on_another() -> None:
    slow = Slow()
    env = GenericEnvClient(provider=slow)
    loop = asyncio.new_event_loop()
    starting = loop.create_task(env.reset())
    while not slow.begun.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    asyncio.run(env.close())
    assert slow.calls == ["stopped"]
    slow.go.set()
    starting._log_destroy_pending = False  # type: ignore[attr-defined]  # it is meant to be left


def test_a_stop_during_the_wait_fails_the_start() -> None:
    waiting, go = threading.Event(), threading.Event()
    stops: list[str] = []
    failures: list[BaseException] = []

    def wait(url: str) -> None:
        waiting.set()
        assert go.wait(PATIENCE_S)

    provider = Released(lambda: "http://h:1", wait, lambda: stops.append("stopped"))

    def start() -> None:
        try:
            provider.start()
        except ProviderError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    provider.stop()
    go.set()
    thread.join(PATIENCE_S)
    assert len(failures) == 1
    assert stops == ["stopped", "stopped"]
    with pytest.raises(ProviderError, match="the client was closed"):
        provider.start()


def test_the_wait_for_a_container_s_server_brings_its_token() -> None:
    variables = {"ROPEWALK_TOKENS": "a-token-of-good-length"}
    with LocalProcessProvider("counter:app", cwd=SUPPORT, env_vars=variables) as server:
        assert server.url is not None
        provider: Any = LocalDockerProvider()
        # What an engine would run, in a process.
        provider._provider = SimpleNamespace(
            url=server.url, options=ContainerOptions(env_vars=variables), output=str
        )
        provider.wait_for_ready(server.url, timeout_s=PATIENCE_S)


def test_a_container_that_is_stopped_while_its_server_is_waited_for_has_not_started() -> None:
    provider: Any = LocalDockerProvider()
    asked = threading.Event()

    class Stopping:
        url = "http://127.0.0.1:9"

        @property
        def options(self) -> ContainerOptions:
            asked.set()
            provider._provider = None  # as stop_container() in another thread
            return ContainerOptions()

        def output(self) -> str:
            return "said"

    provider._provider = Stopping()
    with pytest.raises(ServerStartFailed, match="to be healthy within") as told:
        provider.wait_for_ready("http://127.0.0.1:9", timeout_s=0.3)
    assert asked.is_set()
    assert told.value.output == "said"
