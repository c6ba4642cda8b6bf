"""The reference service of sandboxes: who may do what, what it refuses, and how it keeps its table in order."""

import asyncio
import threading
from typing import Any

import psutil
import pytest
from remote_service import OTHER, TOKEN, service
from serving import eventually, request

from openenv_core import ConfigurationError
from openenv_core.cli.main import main
from openenv_core.providers.remote import (
    SandboxAccessRefusedError,
    SandboxLimitReachedError,
    SandboxRefusedError,
    SandboxSpec,
)
from servers.sandboxes.app import SandboxApp
from servers.sandboxes.backends import SandboxProvider
from servers.sandboxes.limits import SandboxLimits, SandboxRefusalError
from servers.settings import ServerSettings

pytestmark = pytest.mark.usefixtures("looking_often")


async def test_who_may_do_what() -> None:
    async with service(max_sandboxes=2, max_sandboxes_per_token=1, max_lease_s=100) as (_, provider):
        for token in (None, "a-token-that-nobody-knows"):
            with pytest.raises(SandboxAccessRefusedError, match="401") as refused:
                await asyncio.to_thread(provider(token=token).start)
            assert refused.value.status == 401
        with pytest.raises(SandboxRefusedError, match="lease_s of at most 100"):
            await asyncio.to_thread(provider(lease_s=101).start)
        with pytest.raises(
            SandboxRefusedError, match="expected a command without memory_bytes, cpus"
        ) as unsupported:
            await asyncio.to_thread(provider(memory="512m", cpus=0.5).start)
        assert unsupported.value.code == "unsupported"
        mine = provider()
        await asyncio.to_thread(mine.start)
        with pytest.raises(SandboxLimitReachedError, match="at most 1 sandboxes of one token") as limit:
            await asyncio.to_thread(provider().start)
        assert limit.value.retry_after_s == 5
        theirs = provider(token=OTHER)
        await asyncio.to_thread(theirs.start)
        with pytest.raises(SandboxLimitReachedError, match="at most 2 sandboxes, got one more"):
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
        with pytest.raises(SandboxAccessRefusedError, match="--allow-commands") as refused:
            await asyncio.to_thread(provider().start)
        assert refused.value.code == "commands_not_allowed"
        for image in ("bad", "bad/good:1", "goods:1", "elsewhere.example/good:1"):
            with pytest.raises(SandboxAccessRefusedError, match="image that this service allows") as refused:
                await asyncio.to_thread(provider(image=image).start)
            assert refused.value.code == "image_not_allowed"


@pytest.mark.parametrize(
    ("pattern", "image", "run"),
    [
        ("good:*", "good", "good:latest"),
        ("good:*", "good:5000/bad:1", None),
        ("good:*", "good:1@sha256:0123", None),
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
        with pytest.raises(SandboxRefusalError, match="image that this service allows"):
            limits.admit(SandboxSpec(image=image))
    else:
        assert limits.admit(SandboxSpec(image=image)).image == run


def test_what_a_sandbox_asks_for_is_bounded_and_so_is_what_it_does_not() -> None:
    assert SandboxLimits().admit(SandboxSpec(image="x")).memory_bytes == 2 * 2**30
    for asked, said in (
        ({"pids": 1025}, "pids of at most 1024"),
        ({"memory_bytes": 2**31 + 1}, "memory_bytes of at most"),
        ({"start_timeout_s": 601}, "start_timeout_s of at most 600, got 601"),
    ):
        with pytest.raises(SandboxRefusalError, match=said):
            SandboxLimits().admit(SandboxSpec(image="x", **asked))  # type: ignore[arg-type]


NO_SENSE: list[tuple[Any, int, str]] = [
    (b"{", 422, "JSON"),
    (b"{}", 422, "an image or a command"),
    ({"image": "x", "privileged": True}, 422, "privileged: Extra inputs"),
    ({"command": ["x"], "env_vars": {"A": "secret", "B=": "secret"}}, 422, "env_vars"),
    ({"command": ["x"], "lease_s": float("inf")}, 422, "lease_s"),
    (b"[" * 90_000, 422, "body"),
    (b'{"image": "\\ud800"}', 422, ""),
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
    others = set(psutil.Process().children(recursive=True))
    async with service() as (_, provider):
        remote = provider()
        await asyncio.to_thread(remote.start)
        mine = {child.pid for child in set(psutil.Process().children(recursive=True)) - others}
        assert mine
    await eventually(lambda: not any(map(psutil.pid_exists, mine)))
    remote.stop()


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ((), {}, "expected a token, got none"),
        (("--token-file", "/nowhere/tokens"), {}, "--token-file"),
        (("--max-sandboxes", "0"), {"ROPEWALK_TOKENS": TOKEN}, "--max-sandboxes"),
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
