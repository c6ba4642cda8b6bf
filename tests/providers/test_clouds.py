"""Servers in sandboxes of Daytona and Modal, with fake clients that are compared with the real ones."""

import inspect
import json
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import fake_clouds
import httpx
import pytest
from e2b_service import eventually
from free_ports import free_ports
from missing import missing
from module_run import finished
from released import DRIVERS, WAIT_TIMEOUT_S
from slim_server import command

from openenv_core import ServerStartError
from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.providers import DaytonaSandboxProvider, ModalSandboxProvider, remote
from openenv_core.providers.remote import (
    RemoteSandboxProvider,
    SandboxRefusedError,
    SandboxServiceUnavailableError,
)

CLIENTS = DRIVERS.parents[2] / ".venvs" / "clouds" / "bin" / "python"
KINDS = {"daytona": DaytonaSandboxProvider, "modal": ModalSandboxProvider}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The class of a provider, on a fake client."""
    monkeypatch.setitem(sys.modules, request.param, fake_clouds.module(request.param))
    monkeypatch.setenv("DAYTONA_API_KEY", "a-key")
    monkeypatch.setattr("openenv_core.providers.remote.RENEWALS", 20)
    for module in ("remote", "clouds"):
        monkeypatch.setattr(f"openenv_core.providers.{module}.LOG", str(tmp_path / "log"))
    return KINDS[request.param]


def test_server_in_a_cloud_lives_as_long_as_its_owner(make: Any) -> None:
    port = free_ports(1)[0]
    server_command = (sys.executable, *command(port)[1:])
    with make(
        "slim:latest", command=server_command, port=port, env_vars={"GREETING": "aye"}, lease_s=2
    ) as provider:
        machine = fake_clouds.made[-1]
        assert httpx.get(f"{provider.url}/health").json() == {"status": "healthy"}
        assert (provider.alive, provider.output()) == (True, "slim says aye\n")
        eventually(lambda: machine.renewed > 1)
        machine.end()
        eventually(lambda: "is gone" in provider.output())
        assert not provider.alive
    assert (provider.url, machine.there) == (None, False)


def test_cloud_errors_are_reported(make: Any) -> None:
    for image, kind, status in (
        ("no-such-image", SandboxRefusedError, 404),
        ("silent", SandboxServiceUnavailableError, None),
    ):
        with pytest.raises(kind) as refused:
            make(image, command=["x"]).start()
        assert getattr(refused.value, "status", None) == status
    with pytest.raises(ServerStartError, match="healthy within"):
        make("slim", command=["true"], port=free_ports(1)[0], start_timeout_s=0.5).start()
    assert not fake_clouds.made[-1].there


@pytest.mark.parametrize("name", KINDS)
def test_missing_client_library_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'ropewalk\[{name}\]'"):
        KINDS[name]("slim", command=["x"])


def test_lost_renewal_is_followed_by_another_within_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own, as leases are long."""
    now, asked = 0.0, list[float]()

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return now >= 100

    def renew(lease_s: float, timeout_s: float) -> None:
        asked.append(now)
        if len(asked) == 1:
            wait(timeout_s)
            raise TimeoutError

    sandbox = remote._E2BSandbox(MagicMock(sandbox_id="1"), 600, None)
    sandbox.end()
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now))
    vars(sandbox).update(ended=SimpleNamespace(wait=wait), renew=renew, _lease_s=60)
    sandbox._renew_lease()
    assert (asked, sandbox.lost) == ([20, 40, 60, 80], None)


@pytest.mark.interop
def test_forked_servers_have_their_own_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fakes of E2B's class: what runs is copied by its cloud alone."""
    import e2b

    monkeypatch.setattr(remote, "healthy", lambda url, timeout_s: None)
    original, *copies = (MagicMock(e2b.Sandbox, sandbox_id=str(n)) for n in range(4))
    monkeypatch.setattr(e2b.Sandbox, "create", create_autospec(e2b.Sandbox.create, return_value=original))
    provider = RemoteSandboxProvider("mine", api_key="a-key-of-good-length", sandbox_url="http://here/")
    with pytest.raises(ProviderError, match="was not started"):
        provider.fork()
    with provider:
        original.fork.return_value = copies[:1]
        (copy,) = provider.fork()
        assert (copy.url, copy.alive) == ("http://here/sandboxes/1/ports/8000", True)
        original.fork.return_value = [copies[1], e2b.RateLimitException("too many"), copies[2]]
        with pytest.raises(SandboxRefusedError, match="too many"):
            provider.fork(3)
        assert [each.kill.call_count for each in (*copies, original)] == [0, 1, 1, 0]
    assert (original.kill.call_count, copy.alive) == (1, True)
    copy.stop()
    assert copies[0].kill.call_count == 1


@pytest.mark.interop
@pytest.mark.parametrize("name", KINDS)
def test_fakes_match_the_signatures_of_the_clients(name: str) -> None:
    if not CLIENTS.is_file():
        missing(f"needs {name} in .venvs/clouds; get it with ./scripts/test --all")
    fakes: dict[str, Any] = {}
    for path, kind in fake_clouds.CLIENTS[name].items():
        fakes[f"{name}.{path}"] = kind if is_dataclass(kind) else None
        if not issubclass(kind, Exception):
            calls = [each for each in vars(kind) if callable(getattr(kind, each)) and each[0] != "_"]
            fakes |= {f"{name}.{path}.{each}": getattr(kind, each) for each in calls}
    looked = finished(CLIENTS, DRIVERS / "signatures.py", *fakes, timeout_s=WAIT_TIMEOUT_S)
    assert looked.returncode == 0, looked.stderr
    theirs = json.loads(looked.stdout)
    for path, fake in fakes.items():
        if fake is not None:
            ours = set(inspect.signature(fake).parameters)
            assert set(theirs[path]["needs"]) <= ours <= set(theirs[path]["takes"]), path
