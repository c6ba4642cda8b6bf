"""Servers in sandboxes of Daytona and Modal: fakes of their clients, held against the real ones where those are."""

import inspect
import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import fake_clouds
import httpx
import pytest
from e2b_service import eventually
from free_ports import free_ports
from missing import missing
from module_run import finished
from released import DRIVERS, PATIENCE_S
from slim_server import command

from openenv_core import ServerStartError
from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.providers import DaytonaSandboxProvider, ModalSandboxProvider
from openenv_core.providers.remote import (
    HostedServerProvider,
    RemoteSandboxProvider,
    SandboxRefusedError,
    SandboxServiceUnavailableError,
)

CLIENTS = DRIVERS.parents[2] / ".venvs" / "clouds" / "bin" / "python"
Make = Callable[..., HostedServerProvider]
KINDS = {"daytona": DaytonaSandboxProvider, "modal": ModalSandboxProvider}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    monkeypatch.setitem(sys.modules, request.param, fake_clouds.module(request.param))
    monkeypatch.setenv("DAYTONA_API_KEY", "a-key")
    monkeypatch.setattr("openenv_core.providers.remote.RENEWALS", 20)
    monkeypatch.setattr("openenv_core.providers.remote.LOG", log := str(tmp_path / "log"))
    monkeypatch.setattr("openenv_core.providers.clouds.LOG", log)
    return KINDS[request.param]


def test_a_server_runs_in_a_cloud_for_as_long_as_its_owner(make: Make) -> None:
    port = free_ports(1)[0]
    words = (sys.executable, *command(port)[1:])
    with make("slim:latest", command=words, port=port, env_vars={"GREETING": "aye"}, lease_s=2) as provider:
        machine = fake_clouds.made[-1].machine
        assert httpx.get(f"{provider.url}/health").json() == {"status": "healthy"}
        assert (provider.alive, provider.output()) == (True, "slim says aye\n")
        eventually(lambda: machine.renewed > 1)
        machine.end()
        eventually(lambda: "is gone" in provider.output())
        assert not provider.alive
    assert (provider.url, machine.there) == (None, False)


def test_a_cloud_says_what_is_wrong(make: Make) -> None:
    for image, kind, status in (
        ("no-such-image", SandboxRefusedError, 404),
        ("silent", SandboxServiceUnavailableError, None),
    ):
        with pytest.raises(kind) as refused:
            make(image, command=["x"]).start()
        assert getattr(refused.value, "status", None) == status
    with pytest.raises(ServerStartError, match="healthy within"):
        make("slim", command=["true"], port=free_ports(1)[0], start_timeout_s=0.5).start()
    assert not fake_clouds.made[-1].machine.there


@pytest.mark.parametrize("name", KINDS)
def test_a_client_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'ropewalk\[{name}\]'"):
        KINDS[name]("slim", command=["x"])


@pytest.mark.interop
def test_copies_of_a_server_are_providers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fakes of E2B's class: what runs is copied by its cloud alone."""
    import e2b

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "healthy"}')

        def log_message(self, *_: object) -> None: ...

    class FakeSandbox:
        def __init__(self, sandbox_id: str) -> None:
            self.sandbox_id, self.kills, self.forks = sandbox_id, 0, list[Any]()

        def fork(self, timeout: int | None = None, count: int | None = None) -> list[Any]:
            return self.forks

        def is_running(self) -> bool:
            return not self.kills

        def kill(self) -> None:
            self.kills += 1

    original, copies = FakeSandbox("one"), [FakeSandbox(name) for name in ("two", "three", "four")]
    monkeypatch.setattr(e2b.Sandbox, "create", create_autospec(e2b.Sandbox.create, return_value=original))
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        provider = RemoteSandboxProvider("mine", api_key="a-key-of-good-length", sandbox_url=base)
        with pytest.raises(ProviderError, match="was started"):
            provider.fork()
        with provider:
            original.forks = copies[:1]
            (copy,) = provider.fork()
            assert (copy.url, copy.alive) == (f"{base}/sandboxes/two/ports/8000", True)
            original.forks = [copies[1], e2b.RateLimitException("too many"), copies[2]]
            with pytest.raises(SandboxRefusedError, match="too many"):
                provider.fork(3)
            assert (copies[1].kills, copies[2].kills, provider.alive) == (1, 1, True)
        assert (original.kills, copies[0].kills) == (1, 0)
        copy.stop()
        assert copies[0].kills == 1
        server.shutdown()


@pytest.mark.interop
@pytest.mark.parametrize("name", KINDS)
def test_fakes_take_what_the_clients_take(name: str) -> None:
    if not CLIENTS.is_file():
        missing(f"needs {name} in .venvs/clouds; get it with ./scripts/test --all")
    fakes = {f"{name}.{path}": fake for path, fake in fake_clouds.SIGNATURES[name].items()}
    looked = finished(CLIENTS, DRIVERS / "signatures.py", *fakes, timeout_s=PATIENCE_S)
    assert looked.returncode == 0, looked.stderr
    theirs = json.loads(looked.stdout)
    for path, fake in fakes.items():
        if fake is not None:
            ours = set(inspect.signature(fake).parameters)
            assert set(theirs[path]["needs"]) <= ours <= set(theirs[path]["takes"]), path
