"""The remote provider against the reference service, over real sockets; sandboxes are real processes."""

import asyncio
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from remote_service import SUPPORT, TINY, TOKEN, service, threads
from serving import eventually, request

from openenv_core import ConfigurationError, GenericEnvClient, ServerStartError
from openenv_core.providers.base import WatchedProvider
from openenv_core.providers.remote import (
    RemoteSandbox,
    RemoteSandboxProvider,
    SandboxApi,
    SandboxLostError,
    SandboxServiceUnavailableError,
    SandboxState,
)

pytestmark = pytest.mark.usefixtures("looking_often")

LEASE_S = 10.0
"""Longer than a busy machine stands still."""
SHORT_S = 0.45


@pytest.fixture
def renewing_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is long, and the next renewal near all the same."""
    monkeypatch.setattr("openenv_core.providers.remote.RENEWALS", 60)


def ask(url: str, path: str) -> None:
    with suppress(OSError), urllib.request.urlopen(url + path, timeout=10):
        pass


async def test_a_command_is_served_and_goes_with_its_provider() -> None:
    async with service() as (app, provider):
        remote = provider(env_vars={"GREETING": "a handshake"})
        assert isinstance(remote, WatchedProvider)
        assert (remote.alive, remote.output(), remote.url) == (False, "", None)
        url = await asyncio.to_thread(remote.start)
        assert await asyncio.to_thread(remote.start) == url
        assert (await request(url.removeprefix("http://"), "GET", "/health")).json() == {"status": "healthy"}
        assert await asyncio.to_thread(lambda: remote.alive)
        assert await asyncio.to_thread(remote.output) == "tiny says hello with a handshake\n"
        await asyncio.to_thread(remote.stop)
        await asyncio.to_thread(remote.stop)
        assert (len(app.table), remote.url, remote.alive, threads()) == (0, None, False, [])
        # It can be started again, and stops with its block.
        with await asyncio.to_thread(remote.__enter__):
            assert len(app.table) == 1
            await asyncio.to_thread(remote.stop)
        assert len(app.table) == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/nowhere/at/all"], "expected to run '/nowhere/at/all', got: [Errno 2]"),
        ([sys.executable, "-c", "print('wrong turn'); raise SystemExit(4)"], "wrong turn"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(command: list[str], said: str) -> None:
    async with service() as (app, provider):
        with pytest.raises(ServerStartError, match="but it ended") as failed:
            await asyncio.to_thread(provider(command).start)
        assert said in str(failed.value)
        assert (len(app.table), threads()) == (0, [])


async def test_a_stop_makes_a_start_in_another_thread_fail() -> None:
    async with service() as (app, provider):
        remote = provider([sys.executable, "-c", "import time; time.sleep(60)"])
        start = asyncio.create_task(asyncio.to_thread(remote.start))
        await eventually(lambda: remote._ending is not None)
        await asyncio.to_thread(remote.stop)
        with pytest.raises(SandboxLostError, match="stopped meanwhile"):
            await start
        assert (len(app.table), remote.url) == (0, None)


@pytest.mark.soak
@pytest.mark.usefixtures("renewing_often")
async def test_a_sandbox_whose_owner_is_silent_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as (app, provider):
        remote = provider(lease_s=LEASE_S)
        url = await asyncio.to_thread(remote.start)
        (entry,) = app.table._entries.values()
        for _ in range(2):  # it lives on, since somebody renews
            known = entry.expires
            await eventually(lambda known=known: entry.expires > known)
        assert await asyncio.to_thread(lambda: remote.alive)
        leased = remote._leased
        assert leased is not None
        renew, calls = SandboxApi.renew, list[int]()

        def last(api: SandboxApi, sandbox_id: str, lease_s: float, timeout_s: float) -> RemoteSandbox:
            calls.append(1)
            if len(calls) > 1:
                raise SandboxServiceUnavailableError("nothing goes through")
            leased._lease_s = SHORT_S
            return renew(api, sandbox_id, SHORT_S, timeout_s)

        monkeypatch.setattr(SandboxApi, "renew", last)
        await eventually(lambda: len(app.table) == 0)
        with pytest.raises(httpx.ConnectError):
            await request(url.removeprefix("http://"), "GET", "/health")
        await eventually(lambda: not threads())
        assert "ran out: nothing goes through" in await asyncio.to_thread(remote.output)
        await asyncio.to_thread(remote.stop)


@pytest.mark.usefixtures("renewing_often")
@pytest.mark.parametrize("how", ["its server ends", "the service forgets it"])
async def test_a_renewal_learns_that_the_sandbox_has_ended(how: str) -> None:
    async with service() as (app, provider):
        remote = provider(lease_s=LEASE_S)
        url = await asyncio.to_thread(remote.start)
        if how == "its server ends":
            await asyncio.to_thread(ask, url, "/die")
        for entry in list(app.table._entries.values()) if how == "the service forgets it" else ():
            await app.table.delete(entry.owner, entry.id)  # as a service does that restarts
        await eventually(lambda: not threads())
        leased = remote._leased
        assert leased is not None
        if how == "its server ends":
            assert leased.lost == "the sandbox has ended: its server has ended"
            assert not await asyncio.to_thread(lambda: remote.alive)
            assert "dying as told" in await asyncio.to_thread(remote.output)
        else:
            assert not remote.alive
            assert "it ended, or its lease ran out" in await asyncio.to_thread(remote.output)
        await asyncio.to_thread(remote.stop)


@pytest.mark.soak
@pytest.mark.usefixtures("renewing_often")
async def test_a_service_that_is_gone_costs_the_lease_and_no_hang() -> None:
    async with service() as (app, provider):
        remote = provider(lease_s=LEASE_S)
        await asyncio.to_thread(remote.start)
        assert await asyncio.to_thread(lambda: remote.alive)
        (entry,) = app.table._entries.values()
        leased, known = remote._leased, entry.expires
        assert leased is not None
        leased._lease_s = SHORT_S  # what the last renewals ask for
        await eventually(lambda: entry.expires < known)
    await eventually(lambda: not threads())
    assert "ran out" in remote.output()
    remote.stop()


OWNER = """
import sys, time
from openenv_core.providers.remote import RemoteSandboxProvider
remote = RemoteSandboxProvider(sys.argv[1], command=sys.argv[3:], token=sys.argv[2], lease_s=10.0)
print(remote.start(), flush=True)
if sys.stdin.readline():
    sys.exit(0)
"""


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.soak), "ends"])
async def test_nothing_is_left_of_a_dead_owner(how: str) -> None:
    async with service() as (app, provider):
        base_url = provider()._service[0]
        command = [sys.executable, "-c", OWNER, base_url, TOKEN, *TINY]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, text=True, **pipes) as owner:  # noqa: ASYNC220 - it returns at once
            assert owner.stdout is not None
            assert owner.stdin is not None
            assert (await asyncio.to_thread(owner.stdout.readline)).startswith("http://127.0.0.1:")
            assert len(app.table) == 1
            if how == "killed":
                owner.send_signal(signal.SIGKILL)
            else:
                owner.stdin.write("end\n")  # and forgets to stop it
                owner.stdin.flush()
            assert await asyncio.to_thread(owner.wait, 20) == (-signal.SIGKILL if how == "killed" else 0)
            if how == "ends":
                assert len(app.table) == 0  # an interpreter that ends gives it back first
            await eventually(lambda: len(app.table) == 0)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "a?b", "a%2fb", "x" * 129, "a\n"])
def test_a_service_cannot_name_a_sandbox_after_another_path(name: str) -> None:
    with pytest.raises(ValidationError, match="id"):
        RemoteSandbox(id=name, state=SandboxState.RUNNING)


def test_impossible_settings_are_refused_at_once() -> None:
    for options, said in (
        ({}, "an image or a command"),
        ({"image": "x", "port": 0}, "port"),
        ({"image": "x", "memory": "lots"}, "lots"),
        ({"image": "x", "lease_s": 0}, "lease_s"),
        ({"image": "x", "token": "two words"}, "token"),
        ({"command": "python -m http.server"}, "list of words"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            RemoteSandboxProvider("http://127.0.0.1:1", **options)  # type: ignore[arg-type]


SECRETS = ("http://me:hush/x@host:80", "http://me:hush#x@host:y", "ftp://me:hush@host")


@pytest.mark.parametrize("url", ["ftp://x", "nothing", "http://", "http://[:::", *SECRETS])
def test_a_service_has_a_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL") as told:
        RemoteSandboxProvider(url, image="x")
    assert "hush" not in str(told.value)


def test_a_service_that_is_not_there() -> None:
    with pytest.raises(SandboxServiceUnavailableError, match="is it running there") as told:
        RemoteSandboxProvider("http://me:hush@127.0.0.1:1", image="x").start()
    assert "at http://127.0.0.1:1 within" in str(told.value)
    assert "hush" not in str(told.value)
    assert threads() == []


@pytest.mark.slow
async def test_an_environment_is_played_in_a_sandbox() -> None:
    async with service() as (app, provider):
        words = [
            sys.executable,
            "-m",
            "openenv_core.cli",
            "serve",
            f"{SUPPORT}/counter.py",
            "--port",
            "{port}",
        ]
        remote = provider(words, env_vars={"PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}"})
        async with GenericEnvClient(provider=remote) as env:
            await env.reset(seed=3)
            result = await env.step({"amount": 4})
            assert result.observation["total"] == 7
            assert len(app.table) == 1
        assert len(app.table) == 0
