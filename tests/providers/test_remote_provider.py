"""The remote provider against the reference service, over real sockets; sandboxes are real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import ValidationError
from serving import eventually, request, serving

from openenv_core import ConfigurationError, GenericEnvClient, ServerStartFailed
from openenv_core.cli.main import main
from openenv_core.providers.base import Watched
from openenv_core.providers.remote import (
    RemoteSandboxProvider,
    SandboxAccessRefused,
    SandboxLimitReached,
    SandboxLost,
    SandboxRefused,
    SandboxServiceUnavailable,
)
from openenv_core.providers.remote.api import SandboxApi
from openenv_core.providers.remote.messages import Sandbox, SandboxSpec, SandboxState
from servers.sandboxes.app import SandboxApp
from servers.sandboxes.backend import Backend, SandboxProvider
from servers.sandboxes.limits import SandboxLimits
from servers.sandboxes.local import local_backend
from servers.sandboxes.refusals import SandboxRefusal
from servers.settings import ServerSettings

TOKEN = "correct-horse-battery-staple"
OTHER = "another-token-of-good-length"
SUPPORT = Path(__file__).parents[1] / "support"
TINY = [sys.executable, "-I", "-S", str(SUPPORT / "tiny_health.py"), "{port}"]


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.sandboxes.table.LOOK_S", 0.03)
    monkeypatch.setattr("servers.sandboxes.table.AGAIN_S", 0.01)


@asynccontextmanager
async def service(
    backend: Backend = local_backend, **limits: Any
) -> AsyncIterator[tuple[SandboxApp, "Callable[..., RemoteSandboxProvider]"]]:
    """Run a service; yield it, and what makes providers on it."""
    settings = ServerSettings(tokens=(TOKEN, OTHER), max_body_bytes=100_000)
    app = SandboxApp(settings, SandboxLimits(**{"allow_commands": True, **limits}), backend)
    async with serving(app) as address:

        def provider(command: list[str] | None = None, **options: Any) -> RemoteSandboxProvider:
            options = {"token": TOKEN, "start_timeout_s": 20, **options}
            if "image" not in options:
                options["command"] = TINY if command is None else command
            return RemoteSandboxProvider(f"http://{address}", **options)

        yield app, provider


def ask(url: str, path: str) -> None:
    with suppress(OSError), urllib.request.urlopen(url + path, timeout=10):
        pass


def ended(remote: RemoteSandboxProvider) -> None:
    deadline = time.monotonic() + 20
    while remote.alive:
        assert time.monotonic() < deadline, "expected it to have ended by now"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "openenv-sandbox-lease"]


async def test_a_command_is_served_and_goes_with_its_provider() -> None:
    async with service() as (app, provider):
        remote = provider(env_vars={"GREETING": "a handshake"})
        assert isinstance(remote, Watched)
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


async def test_a_server_that_dies_is_noticed_and_has_its_last_words() -> None:
    async with service() as (app, provider):
        remote = provider()
        url = await asyncio.to_thread(remote.start)
        await asyncio.to_thread(ask, url, "/die")
        await asyncio.to_thread(ended, remote)
        assert "dying as told" in await asyncio.to_thread(remote.output)
        await asyncio.to_thread(remote.stop)
        assert len(app.table) == 0


async def test_the_end_of_a_sandbox_is_learnt_from_its_lease() -> None:
    async with service() as (_, provider):
        remote = provider(lease_s=0.45)
        url = await asyncio.to_thread(remote.start)
        await asyncio.to_thread(ask, url, "/die")
        await eventually(lambda: not threads())  # nobody has asked for it
        leased = remote._leased
        assert leased is not None
        assert leased.lost == "the sandbox has ended: its server has ended"
        await asyncio.to_thread(remote.stop)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/nowhere/at/all"], "expected to run '/nowhere/at/all', got: [Errno 2]"),
        ([sys.executable, "-c", "print('wrong turn'); raise SystemExit(4)"], "wrong turn"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(command: list[str], said: str) -> None:
    async with service() as (app, provider):
        with pytest.raises(ServerStartFailed, match="but it ended") as failed:
            await asyncio.to_thread(provider(command).start)
        assert said in str(failed.value)
        assert (len(app.table), threads()) == (0, [])


@pytest.mark.slow
async def test_a_server_that_is_never_healthy_runs_out_of_time() -> None:
    async with service() as (app, provider):
        with pytest.raises(ServerStartFailed, match="sick"):
            await asyncio.to_thread(provider([*TINY, "sick"], start_timeout_s=0.5).start)
        assert len(app.table) == 0


async def test_a_stop_makes_a_start_in_another_thread_fail() -> None:
    async with service() as (app, provider):
        remote = provider([sys.executable, "-c", "import time; time.sleep(60)"])
        start = asyncio.create_task(asyncio.to_thread(remote.start))
        await eventually(lambda: remote._running is not None)
        await asyncio.to_thread(remote.stop)
        with pytest.raises(SandboxLost, match="stopped meanwhile"):
            await start
        assert (len(app.table), remote.url) == (0, None)


def silent(*_: object) -> None:
    raise SandboxServiceUnavailable("nothing goes through")


@pytest.mark.slow
async def test_a_sandbox_whose_owner_is_silent_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as (app, provider):
        remote = provider(lease_s=0.45)
        url = await asyncio.to_thread(remote.start)
        # A lease later it still runs, since somebody renews.
        await asyncio.sleep(0.7)
        assert await asyncio.to_thread(lambda: remote.alive)
        monkeypatch.setattr(SandboxApi, "renew", silent)
        await eventually(lambda: len(app.table) == 0)
        with pytest.raises(httpx.ConnectError):
            await request(url.removeprefix("http://"), "GET", "/health")
        await eventually(lambda: not threads())
        assert "ran out: nothing goes through" in await asyncio.to_thread(remote.output)
        await asyncio.to_thread(remote.stop)


async def test_a_lost_lease_is_noticed_by_its_owner() -> None:
    async with service() as (app, provider):
        remote = provider(lease_s=0.45)
        await asyncio.to_thread(remote.start)
        for entry in list(app.table._entries.values()):
            await app.table.delete(entry.owner, entry.id)  # as a service does that restarts
        await eventually(lambda: not threads())
        assert not remote.alive
        assert "it ended, or its lease ran out" in await asyncio.to_thread(remote.output)
        await asyncio.to_thread(remote.stop)


@pytest.mark.slow
async def test_a_service_that_is_gone_costs_the_lease_and_no_hang() -> None:
    async with service() as (_, provider):
        remote = provider(lease_s=0.5)
        await asyncio.to_thread(remote.start)
        assert await asyncio.to_thread(lambda: remote.alive)
    await eventually(lambda: not threads())
    assert "ran out" in remote.output()
    remote.stop()


OWNER = """
import sys, time
from openenv_core.providers.remote import RemoteSandboxProvider
remote = RemoteSandboxProvider(sys.argv[1], command=sys.argv[3:], token=sys.argv[2], lease_s=1.0)
print(remote.start(), flush=True)
if sys.stdin.readline():
    sys.exit(0)
"""


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.slow), "ends"])
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


async def test_who_may_do_what() -> None:
    async with service(max_sandboxes=2, max_sandboxes_per_token=1, max_lease_s=100) as (_, provider):
        for token in (None, "a-token-that-nobody-knows"):
            with pytest.raises(SandboxAccessRefused, match="401") as refused:
                await asyncio.to_thread(provider(token=token).start)
            assert refused.value.status == 401
        with pytest.raises(SandboxRefused, match="lease_s of at most 100"):
            await asyncio.to_thread(provider(lease_s=101).start)
        with pytest.raises(
            SandboxRefused, match="expected a command without memory_bytes, cpus"
        ) as unsupported:
            await asyncio.to_thread(provider(memory="512m", cpus=0.5).start)
        assert unsupported.value.code == "unsupported"
        mine = provider()
        await asyncio.to_thread(mine.start)
        with pytest.raises(SandboxLimitReached, match="at most 1 sandboxes of one token") as limit:
            await asyncio.to_thread(provider().start)
        assert limit.value.retry_after_s == 5
        theirs = provider(token=OTHER)
        await asyncio.to_thread(theirs.start)
        with pytest.raises(SandboxLimitReached, match="at most 2 sandboxes, got one more"):
            await asyncio.to_thread(provider(token=OTHER).start)
        # Another's sandbox is as good as none, and lives on.
        address = mine._service[0].removeprefix("http://")
        stranger = {"authorization": f"Bearer {OTHER}"}
        path = f"/v1/sandboxes/{mine.sandbox_id}"
        for method, where in (("GET", ""), ("GET", "/logs"), ("DELETE", ""), ("POST", "/lease")):
            answer = await request(address, method, path + where, {"lease_s": 1}, headers=stranger)
            assert (answer.status_code, answer.json()["code"]) == (404, "no_such_sandbox")
        assert await asyncio.to_thread(lambda: mine.alive)
        for remote in (mine, theirs):
            await asyncio.to_thread(remote.stop)


async def test_commands_and_images_are_a_matter_of_permission() -> None:
    async with service(allow_commands=False, images=("good:*",)) as (_, provider):
        with pytest.raises(SandboxAccessRefused, match="--allow-commands") as refused:
            await asyncio.to_thread(provider().start)
        assert refused.value.code == "commands_not_allowed"
        for image in ("bad", "bad/good:1", "goods:1", "elsewhere.example/good:1"):
            with pytest.raises(SandboxAccessRefused, match="image that this service allows") as refused:
                await asyncio.to_thread(provider(image=image).start)
            assert refused.value.code == "image_not_allowed"


@pytest.mark.parametrize(
    ("pattern", "image", "run"),
    [
        ("good:*", "good", "good:latest"),
        ("good:*", "good:5000/bad:1", None),
        ("good:*", "good:1@sha256:0123", None),
        ("good:*", "GOOD:1", None),
        ("good", "good", "good:latest"),
        ("good", "good:2", None),
        ("*:latest", "0123456789ab", "0123456789ab:latest"),  # a name now, no part of an id
        ("here.example:5000/*", "here.example:5000/any:1", None),
        ("here.example:5000/*:*", "here.example:5000/any:1", "here.example:5000/any:1"),
        ("*", "any.example/thing:3", "any.example/thing:3"),
        ("a\nb", "a", None),
    ],
)
def test_an_image_runs_under_the_name_that_was_allowed(pattern: str, image: str, run: str | None) -> None:
    limits = SandboxLimits(images=(pattern,))
    if run is None:
        with pytest.raises(SandboxRefusal, match="image that this service allows"):
            limits.admit(SandboxSpec(image=image))
    else:
        assert limits.admit(SandboxSpec(image=image)).image == run


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "a?b", "a%2fb", "x" * 129, "a\n"])
def test_a_service_cannot_name_a_sandbox_after_another_path(name: str) -> None:
    with pytest.raises(ValidationError, match="id"):
        Sandbox(id=name, state=SandboxState.RUNNING)


def test_what_a_sandbox_asks_for_is_bounded_and_so_is_what_it_does_not() -> None:
    assert SandboxLimits().admit(SandboxSpec(image="x")).memory_bytes == 2 * 2**30
    with pytest.raises(SandboxRefusal, match="pids of at most 1024"):
        SandboxLimits().admit(SandboxSpec(image="x", pids=1025))


NO_SENSE: list[tuple[Any, int, str]] = [
    (b"{", 422, "JSON"),
    (b"{}", 422, "an image or a command"),
    ({"image": "x", "privileged": True}, 422, "privileged: Extra inputs"),
    ({"command": ["x"], "env_vars": {"A": "secret", "B=": "secret"}}, 422, "env_vars"),
    ({"command": ["x"], "lease_s": float("inf")}, 422, "lease_s"),
    ({"command": ["x\0"]}, 422, "NUL"),
    (b"[" * 90_000, 422, "body"),
    (b'{"image": "\\ud800"}', 422, ""),
    (b'\xff\xfe{"image": "x"}', 422, ""),
    (b'{"image": "x", "lease_s": NaN}', 422, "lease_s"),
    (b'{"image": "x", "pids": ' + b"9" * 5000 + b"}", 422, ""),
    ({"command": ["x" * 100_001]}, 413, "100000 bytes"),
]


async def test_what_makes_no_sense_is_refused() -> None:
    async with service() as (app, provider):
        address = provider()._service[0].removeprefix("http://")
        headers = {"authorization": f"Bearer {TOKEN}"}
        for body, status, said in NO_SENSE:
            answer = await request(address, "POST", "/v1/sandboxes", body, headers)
            assert (answer.status_code, said in answer.json()["detail"]) == (status, True), (
                body,
                answer.text,
            )
            assert "secret" not in answer.text
        plain = await request(
            address, "POST", "/v1/sandboxes", b"{}", {**headers, "content-type": "text/plain"}
        )
        assert plain.status_code == 415
        assert len(app.table) == 0


def test_without_a_token_there_is_no_service() -> None:
    with pytest.raises(ConfigurationError, match="expected a token"):
        SandboxApp(ServerSettings(), SandboxLimits())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "an image or a command"),
        ({"image": "x", "port": 0}, "port"),
        ({"image": "x", "memory": "lots"}, "lots"),
        ({"image": "x", "lease_s": 0}, "lease_s"),
        ({"image": "x", "token": "two words"}, "token"),
        ({"command": "python -m http.server"}, "list of words"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RemoteSandboxProvider("http://127.0.0.1:1", **options)


@pytest.mark.parametrize("url", ["ftp://x", "nothing", "http://", "http://[:::"])
def test_a_service_has_a_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        RemoteSandboxProvider(url, image="x")


def test_a_service_that_is_not_there() -> None:
    with pytest.raises(SandboxServiceUnavailable, match="is it running there"):
        RemoteSandboxProvider("http://127.0.0.1:1", image="x").start()
    assert threads() == []


class Fragile:
    """A sandbox whose removal fails twice, as that of an engine which restarts."""

    made: "list[Fragile]" = []  # noqa: RUF012 - one test's
    alive = True

    def __init__(self, spec: SandboxSpec) -> None:
        self.failures = 2
        self.made.append(self)

    def start(self) -> str:
        return "http://127.0.0.1:1"

    def stop(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the engine is away")

    def output(self) -> str:
        return ""


async def test_a_removal_that_fails_is_tried_again_and_keeps_its_slot() -> None:
    Fragile.made.clear()
    async with service(Fragile, max_sandboxes=1) as (app, _):
        made = app.table.create("me", SandboxSpec(image="x"))
        await app.table.get("me", made.id, 5)
        with pytest.raises(Exception, match="the engine is away"):
            await app.table.delete("me", made.id)
        with pytest.raises(Exception, match="at most 1 sandboxes"):
            app.table.create("me", SandboxSpec(image="x"))
        await eventually(lambda: len(app.table) == 0)
        assert [each.failures for each in Fragile.made] == [0]


class Slow:
    """A sandbox that starts when it is let, and that notes in which order it was started and stopped."""

    def __init__(self, gate: threading.Event, story: list[str]) -> None:
        self.gate, self.story, self.alive = gate, story, True

    def start(self) -> str:
        self.gate.wait(20)
        self.story.append("started")
        return "http://127.0.0.1:1"

    def stop(self) -> None:
        self.story.append("stopped")

    def output(self) -> str:
        return ""


async def test_a_start_that_comes_to_its_end_after_the_deletion_is_undone() -> None:
    gate, story = threading.Event(), list[str]()

    def backend(_: SandboxSpec) -> SandboxProvider:
        return Slow(gate, story)

    async with service(backend, max_starting=1) as (app, _):
        first = app.table.create("me", SandboxSpec(image="x"))
        second = app.table.create("me", SandboxSpec(image="x"))
        await app.table.delete("me", second.id)  # waits for its turn, so nothing was made
        assert story == []
        deletion = asyncio.create_task(app.table.delete("me", first.id))
        await eventually(lambda: story == ["stopped"])
        gate.set()
        await deletion
        assert story == ["stopped", "started", "stopped"]
        assert len(app.table) == 0


async def test_the_reaper_is_replaced_when_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, story = threading.Event(), list[str]()
    gate.set()
    async with service(lambda _: Slow(gate, story)) as (app, _):
        app.table.create("me", SandboxSpec(image="x", lease_s=0.3))
        end, calls = app.table._end, list[int]()

        def broken(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise MemoryError
            return end(*arguments)

        monkeypatch.setattr(app.table, "_end", broken)
        await eventually(lambda: len(app.table) == 0)
        assert len(calls) == 2


async def test_a_service_that_stops_leaves_nothing() -> None:
    async with service() as (_, provider):
        remote = provider()
        await asyncio.to_thread(remote.start)
        mine = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
        assert mine
    await eventually(lambda: not any(map(psutil.pid_exists, mine)))
    remote.stop()


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


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ((), {}, "expected a token, got none"),
        (("--token-file", "/nowhere/tokens"), {}, "--token-file"),
        (("--max-sandboxes", "0"), {"ROPEWALK_TOKENS": TOKEN}, "--max-sandboxes"),
        (("--max-memory", "lots"), {"ROPEWALK_TOKENS": TOKEN}, "lots"),
        ((), {"ROPEWALK_TOKENS": "short"}, "at least 16"),
    ],
)
def test_the_command_refuses_what_cannot_be(
    words: tuple[str, ...], environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["sandboxes", *words, "--port", "0"]) == 2
    assert said in capfd.readouterr().err
