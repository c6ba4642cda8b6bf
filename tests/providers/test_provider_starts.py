"""Starts of providers: cancelled ones, released interfaces, containers that end, commands."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from serving import eventually

from openenv_core import ContainerOptions, GenericEnvClient, LocalProcessProvider
from openenv_core.compat.containers import LocalDockerProvider
from openenv_core.errors import (
    ClientClosedError,
    EngineRefusedError,
    ImageNotFoundError,
    OptionUnavailableError,
    ProviderError,
    ServerStartError,
)
from openenv_core.providers.base import CallableProvider, OwnedServerProvider
from openenv_core.providers.docker import container
from openenv_core.providers.docker import container as starting
from openenv_core.providers.docker.container import Container, ContainerState

WAIT_TIMEOUT_S = 60
SUPPORT = str(Path(__file__).parents[1] / "support")


class Slow:
    """A provider whose container is there when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def start_container(self, image: str = "", **options: Any) -> str:
        self.begun.set()
        assert self.go.wait(WAIT_TIMEOUT_S)
        self.calls.append("made")
        return "http://127.0.0.1:9"

    def wait_for_ready(self, base_url: str) -> None:
        self.calls.append("waited")

    def stop_container(self) -> None:
        self.calls.append("stopped")


@pytest.mark.parametrize(
    ("client", "closes"),
    [
        (lambda slow: GenericEnvClient(provider=slow).sync(), False),
        (lambda slow: GenericEnvClient.from_docker_image("some:image", provider=slow), False),
        (lambda slow: GenericEnvClient(provider=slow), True),
    ],
    ids=["by itself", "told the image", "closed meanwhile"],
)
async def test_start_that_is_cancelled_or_closed_does_not_wait_and_its_container_is_stopped(
    client: Callable[[Slow], Any], closes: bool
) -> None:
    slow = Slow()
    env = client(slow)

    async def use() -> None:
        await (env.reset() if closes else env)

    using = asyncio.create_task(use())
    assert await asyncio.to_thread(slow.begun.wait, WAIT_TIMEOUT_S)
    if closes:
        await env.close()
    else:
        using.cancel()
    with pytest.raises(ClientClosedError if closes else asyncio.CancelledError):
        await using
    assert slow.calls == ["stopped"]  # by the client's end: there was nothing to stop
    slow.go.set()
    await eventually(lambda: slow.calls == ["stopped", "made", "stopped"])


def test_a_stop_that_was_interrupted_is_done_by_the_next() -> None:
    calls: list[str] = []

    def end(_: str) -> None:
        calls.append("end")
        if len(calls) == 1:
            raise KeyboardInterrupt

    class Provider(OwnedServerProvider):
        def _launch(self) -> str:
            self._ending = weakref.finalize(self, end, "it")
            return "http://127.0.0.1:9"

    provider = Provider()
    provider.start()
    with pytest.raises(KeyboardInterrupt):
        provider.stop()
    provider.stop()
    provider.stop()
    assert calls == ["end", "end"]


def test_client_of_a_closed_loop_can_be_closed_on_another() -> None:
    slow = Slow()
    env = GenericEnvClient(provider=slow)

    async def reset() -> None:
        await env.reset()

    loop = asyncio.new_event_loop()
    starting = loop.create_task(reset())
    while not slow.begun.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    asyncio.run(env.__aexit__())
    assert slow.calls == ["stopped"]
    slow.go.set()
    starting._log_destroy_pending = False  # type: ignore[attr-defined]  # it is meant to be left


def test_stop_during_the_wait_fails_the_start() -> None:
    waiting, go = threading.Event(), threading.Event()
    stops: list[str] = []

    def wait(url: str) -> None:
        waiting.set()
        assert go.wait(WAIT_TIMEOUT_S)

    provider = CallableProvider(lambda: "http://h:1", wait, lambda: stops.append("stopped"))
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(provider.start)
        assert waiting.wait(WAIT_TIMEOUT_S)
        provider.stop()
        go.set()
        with pytest.raises(ProviderError):
            starting.result(WAIT_TIMEOUT_S)
    assert stops == ["stopped", "stopped"]
    with pytest.raises(ProviderError, match="the client was closed"):
        provider.start()


def test_functions_of_a_provider_are_called_for_what_there_is() -> None:
    begin, end = Mock(side_effect=OSError("no such image")), Mock(side_effect=RuntimeError("nothing runs"))
    with pytest.raises(OSError, match="no such image"):
        CallableProvider(begin, str, end).start()
    end.assert_not_called()
    provider = CallableProvider(lambda: "http://h:1", str, lambda: None)
    assert provider.start() == provider.start() == "http://h:1"
    provider.stop()  # whose URL it gives no more
    with pytest.raises(ProviderError, match="the client was closed"):
        provider.start()


@pytest.mark.slow
def test_readiness_check_of_a_container_uses_its_token() -> None:
    variables = {"ROPEWALK_TOKENS": "a-token-of-good-length"}
    with LocalProcessProvider("counter:app", cwd=SUPPORT, env_vars=variables) as server:
        assert server.url is not None
        provider: Any = LocalDockerProvider()
        # What an engine would run, in a process.
        provider._provider = SimpleNamespace(
            url=server.url, options=ContainerOptions(env_vars=variables), output=str
        )
        provider.wait_for_ready(server.url, timeout_s=WAIT_TIMEOUT_S)


def test_start_after_the_stop_signal_sees_it() -> None:
    stopping, signalled, begun = threading.Event(), threading.Event(), threading.Event()

    class Provider(OwnedServerProvider):
        def _launch(self) -> str:
            begun.set()
            signalled.wait(WAIT_TIMEOUT_S)
            stopping.clear()  # as every start does
            assert stopping.wait(WAIT_TIMEOUT_S)
            raise ProviderError("stopped meanwhile")

        def _interrupt(self) -> None:
            stopping.set()
            signalled.set()

    provider = Provider()
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(provider.start)
        assert begun.wait(WAIT_TIMEOUT_S)
        provider.stop()
        with pytest.raises(ProviderError, match="stopped meanwhile"):
            starting.result(WAIT_TIMEOUT_S)


# ---- containers that end while they start

KILLED = ContainerState(False, 137)
FOR_MEMORY = ContainerState(False, 137, out_of_memory=True)


class Ended(Container):
    """Is seen to have ended in one way after the other; the last one stays."""

    def __init__(self, *seen: ContainerState | Exception) -> None:
        self.image = "some:image"
        self.looks = 0
        self._seen: Iterator[ContainerState | Exception] = iter(seen)
        self._last = seen[-1]

    def state(self) -> ContainerState:
        self.looks += 1
        current = next(self._seen, self._last)
        if isinstance(current, Exception):
            raise current
        return current

    def logs(self, tail: int = 0) -> str:
        if isinstance(self._last, Exception):
            raise self._last
        return "its last words"


@pytest.fixture
def oom_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "OOM_POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(container, "OOM_EVENT_WAIT_S", 0.5)


@pytest.mark.usefixtures("oom_noticed_soon")
@pytest.mark.parametrize(
    ("states", "expected", "looks"),
    [
        # The engine's notice may come after the end.
        ((KILLED, KILLED, FOR_MEMORY), "exit code 137, killed for its memory; raise memory", 3),
        ((KILLED,), "exit code 137; something killed it: raise memory if", None),
        # What ended by itself is not waited for.
        ((ContainerState(False, 3),), "exit code 3; the output tells why", 1),
        ((KILLED, EngineRefusedError("no such container", 404, "")), "somebody removed it", 2),
    ],
)
def test_container_that_ended_at_its_start_reports_why(
    states: tuple[Any, ...], expected: str, looks: int | None
) -> None:
    ended = Ended(*states)
    with pytest.raises(ServerStartError, match=expected) as error:
        starting._require_running(ended)
    assert error.value.output == ("" if expected.startswith("somebody") else "its last words")
    assert looks is None or ended.looks == looks


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (404, "No such image: network-of-gpu-env:1", ImageNotFoundError),
        (404, "network mine not found", OptionUnavailableError),
        (500, 'could not select device driver "" with capabilities: [[gpu]]', OptionUnavailableError),
        (404, "No such container: 1f", EngineRefusedError),  # somebody removed it before its start
    ],
)
def test_refusal_of_an_engine_is_named(status: int, reason: str, expected: type[Exception]) -> None:
    options = ContainerOptions(network="mine", gpus="all")
    error = starting._explain(EngineRefusedError(reason, status, reason), "an:image", "an:image", options)
    assert type(error) is expected
