"""`ropewalk sandboxes` as a process, and E2B's released clients: the sync one, and the async one wrapped to be sync."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from missing import missing
from serve_process import eventually

KEY, OTHER = "correct-horse-battery-staple", "another-key-of-good-length"
WAIT_TIMEOUT_S = 60
IMAGE = "python:3.11-slim"


class Sync:
    """A sync wrapper of an async object; the objects it returns are wrapped too."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.inner, self._loop = inner, loop

    def __getattr__(self, name: str) -> Any:
        return self._plain(getattr(self.inner, name))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._plain(self.inner(*args, **options))

    def _plain(self, value: Any) -> Any:
        if inspect.isawaitable(value) and not hasattr(value, "pid"):
            value = self._loop.run_until_complete(value)
        if callable(value) or type(value).__module__.startswith(
            ("e2b.sandbox_async", "e2b_code_interpreter.code")
        ):
            return Sync(value, self._loop)
        return value


@dataclass
class Service:
    """A running service."""

    url: str
    process: "subprocess.Popen[str]"

    def options(self, key: str = KEY) -> dict[str, Any]:
        return {"api_url": self.url, "sandbox_url": self.url, "api_key": key}


@contextmanager
def running_service(tmp_path: Path, *words: str) -> Iterator[Service]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{KEY}\n{OTHER}\n")
    command = [sys.executable, "-m", "openenv_core.cli", "sandboxes", "--port", "0", *words]
    process = subprocess.Popen(
        [*command, "--token-file", str(tokens)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "ROPEWALK_TOKENS": "a-third-key-of-good-length"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line
        yield Service(line.split()[-1], process)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")  # other modules inspect processes
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ("--image", "python:*", "--image", "ropewalk-test-*", "--max-sandboxes", "32", "--disk", "64m")
    with running_service(tmp_path_factory.mktemp("service"), *options) as started:
        yield started


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The class `Sandbox` of E2B's code interpreter, sync or async."""
    try:
        import e2b_code_interpreter
    except ImportError as error:
        missing(f"needs E2B's released clients ({error}); ./scripts/test --all installs them")
    if request.param == "sync":
        yield e2b_code_interpreter.Sandbox
        return
    loop = asyncio.new_event_loop()
    yield Sync(e2b_code_interpreter.AsyncSandbox, loop)
    loop.close()


KINDS = ["base", pytest.param(IMAGE, marks=[pytest.mark.docker], id="image")]


@pytest.fixture(params=KINDS)
def template(request: pytest.FixtureRequest) -> str:
    if request.param != "base":
        request.getfixturevalue("engine")
    return str(request.param)


@pytest.fixture
def create(client: Any, service: Service) -> Iterator[Callable[..., Any]]:
    """Creates sandboxes, which are killed after the test."""
    created: list[Any] = []

    def make(template: str = "base", key: str = KEY, **options: Any) -> Any:
        created.append(client.create(template, timeout=120, **{**service.options(key), **options}))
        return created[-1]

    yield make
    for each in created:
        each.kill()


@pytest.fixture
def sandbox(create: Callable[..., Any], template: str) -> Any:
    created = create(template, envs={"GREETING": "aye"}, metadata={"run": "7"})
    eventually(lambda: created.commands.list() == [])  # the image's command ends at once
    return created
