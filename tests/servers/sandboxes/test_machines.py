"""Hostile agents of sandboxes, contained attacks, and what stays after a kill of the service."""

import asyncio
import gc
import itertools
import json
import signal
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import psutil
import pytest
from e2b_service import IMAGE, KEY, WAIT_TIMEOUT_S, Service, eventually, running_service
from sandbox_levels import sandbox_at
from serving import eventually as until
from slim_server import command
from starlette.applications import Starlette

from openenv_core import ServerStartError
from openenv_core.errors import ConfigurationError, ImageNotFoundError
from openenv_core.providers.docker import ContainerOptions, DockerEngine
from openenv_core.providers.remote import (
    RemoteSandboxProvider,
    SandboxRefusedError,
    SandboxServiceUnavailableError,
)
from openenv_core.sandbox import Isolation, Limits
from openenv_core.sandbox.inside.interpreter import FRAME, pack
from servers.routes.http import CLIENT_LEFT
from servers.sandboxes import envd, interpreter, machines
from servers.sandboxes import guest as guests
from servers.sandboxes.app import SandboxApp, _on_api_error
from servers.sandboxes.guest import ApiError, Guest, GuestError
from servers.sandboxes.machines import ContainerMachine, Machine, ProcessMachine, WarmContainers
from servers.sandboxes.table import Record, SandboxLimits, SandboxTable
from servers.settings import ServerSettings

sys.path.append(str(Path(__file__).parents[2] / "sandbox"))

from attacks.catalogue import CATALOGUE
from attacks.model import FILTERED, MARK, with_tools
from attacks.surroundings import SECRET, Surroundings
from living import descendants

# ---- an agent that the code has taken over


@asynccontextmanager
async def guest_with_fake_agent() -> AsyncIterator[tuple[Guest, socket.socket]]:
    """Yield a guest, and the socket that its agent would have."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    guest = Guest(reader, writer)
    yield guest, theirs
    theirs.close()
    await guest.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 64,
        FRAME.pack(guests.MAX_HEADER + 1, 0),
        FRAME.pack(2, guests.MAX_BLOB + 1) + b"{}",
        FRAME.pack(2, 0) + b"[]",
        FRAME.pack(2, 0) + b"{}",
        FRAME.pack(60_000, 0) + b"[" * 60_000,
        pack({"id": "one"}),
        FRAME.pack(13, 0) + b'{"id": 1e400}',
        pack({"hello": 1}),
    ],
)
async def test_invalid_frame_from_the_agent_ends_the_sandbox(frame: bytes) -> None:
    async with guest_with_fake_agent() as (guest, agent), guest.subscribed("p1") as output:
        request = asyncio.create_task(guest.ask("stat", path="x"))
        await asyncio.sleep(0)
        agent.send(frame)
        with pytest.raises(GuestError, match="was not found") as error:
            await asyncio.wait_for(request, WAIT_TIMEOUT_S)
        assert error.value.code == "unavailable"
        assert "invalid frame" in await guest.gone
        came = await output.take(WAIT_TIMEOUT_S)
        assert came is not None
        assert came[0]["lost"]


async def test_output_flood_from_the_agent_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "MAX_BUFFERED", 1 << 20)
    monkeypatch.setattr(guests, "MAX_UNREAD", 1 << 20)
    loop = asyncio.get_running_loop()
    async with guest_with_fake_agent() as (guest, agent), guest.subscribed("p1") as output:
        for _ in range(40):  # whatever the window says
            await loop.sock_sendall(agent, pack({"stream": "p1", "pipe": "stdout"}, b"x" * 50_000))
        await loop.sock_sendall(agent, pack({"stream": "p1", "end": 0}))
        while (came := await output.take(WAIT_TIMEOUT_S)) is not None and not came[0].get("lost"):
            pass
        assert came is not None
        assert "not read in time" in came[0]["status"]
        # Output that nobody reads is acknowledged, and the agent reads nothing of that.
        with suppress(OSError):
            while not guest.gone.done():
                await loop.sock_sendall(agent, pack({"stream": "nobody", "pipe": "stdout"}, b"x"))
        assert "does not read" in await guest.gone


async def test_ends_from_the_agent_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "MAX_BUFFERED", 1 << 20)
    loop = asyncio.get_running_loop()
    async with guest_with_fake_agent() as (guest, agent), guest.subscribed("p1") as output:
        for _ in range(40):
            await loop.sock_sendall(agent, pack({"stream": "p1", "end": 0}, b"x" * 50_000))
        await everything_read(guest, agent)
        assert output._bytes <= 1 << 20


async def test_upload_ends_with_its_sandbox() -> None:
    async with guest_with_fake_agent() as (guest, agent):

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x"
            agent.close()
            await guest.gone
            yield b"y"
            raise AssertionError("nobody takes this")

        with pytest.raises(GuestError, match="was not found"):
            await envd._write(guest, "path", pieces())


async def everything_read(guest: Guest, agent: socket.socket) -> None:
    """Wait until a guest has read what its agent has sent."""
    stat = asyncio.create_task(guest.ask("stat", path="x"))
    number = (await request(agent, "stat"))["id"]
    await asyncio.get_running_loop().sock_sendall(agent, pack({"id": number}))
    await stat


async def request(agent: socket.socket, op: str) -> dict[str, Any]:
    """The next request of this kind that an agent gets."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while True:
            head, size = FRAME.unpack(await loop.sock_recv(agent, FRAME.size))
            header: dict[str, Any] = json.loads(await loop.sock_recv(agent, head + size))
            if header["op"] == op:
                return header


async def begun(events: Any, agent: socket.socket) -> dict[str, Any]:
    """Let a command start; return the request that started it."""
    first = asyncio.create_task(anext(events))
    start = await request(agent, "start")
    await asyncio.get_running_loop().sock_sendall(agent, pack({"id": start["id"], "pid": 7}))
    assert await first == {"event": {"start": {"pid": 7}}}
    return start


@pytest.mark.parametrize(
    ("end", "status"), [(-1, "signal: killed"), (-1, "signal: segmentation fault"), (0, "exit status 0")]
)
async def test_command_killed_at_its_deadline_reports_timeout_even_if_read_late(
    end: int, status: str
) -> None:
    loop = asyncio.get_running_loop()
    async with guest_with_fake_agent() as (guest, agent):
        events = envd._start(guest, {"process": {"cmd": "sleep"}}, 0.05)
        start = await begun(events, agent)
        next_one = asyncio.create_task(anext(events))
        await request(agent, "signal")
        await loop.sock_sendall(agent, pack({"stream": start["stream"], "end": end, "status": status}))
        if "killed" in status:
            with pytest.raises(GuestError) as error:
                await next_one
            assert error.value.code == "deadline_exceeded"
        else:  # it had ended before
            assert (await next_one)["event"]["end"]["status"] == status


@pytest.mark.parametrize("ended_by", ["read", "unread", "gone"])
async def test_nothing_of_an_ended_command_is_kept_until_its_deadline(ended_by: str) -> None:
    loop = asyncio.get_running_loop()
    async with guest_with_fake_agent() as (guest, agent):
        events = envd._start(guest, {"process": {"cmd": "true"}}, 86_400.0)
        start = await begun(events, agent)
        output = weakref.ref(guest._streams[start["stream"]][0])
        if ended_by != "read":
            await events.aclose()  # the client leaves
        if ended_by == "gone":
            await guest.close()
        await loop.sock_sendall(agent, pack({"stream": start["stream"], "end": 0, "status": ""}))
        if ended_by == "read":
            assert ["end" in event["event"] async for event in events] == [True]
        elif ended_by == "unread":
            await everything_read(guest, agent)
        del events
        gc.collect()
        assert output() is None


async def test_a_command_whose_client_leaves_during_its_start_has_a_deadline() -> None:
    async with guest_with_fake_agent() as (guest, agent):
        events = envd._start(guest, {"process": {"cmd": "sleep"}}, 0.05)
        first = asyncio.create_task(anext(events))
        start = await request(agent, "start")
        first.cancel()
        assert (await request(agent, "signal"))["stream"] == start["stream"]


async def test_a_cell_that_writes_faster_than_is_read_is_interrupted_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guests, "MAX_BUFFERED", 1000)
    loop, turn = asyncio.get_running_loop(), asyncio.Lock()
    async with guest_with_fake_agent() as (guest, agent):
        record: Any = SimpleNamespace(guest=guest, id="id")
        table: Any = SimpleNamespace(spawn=lambda work, _: asyncio.create_task(work))
        lines = interpreter._run(record, table, "c", turn, "code", {})
        first = asyncio.create_task(anext(lines))
        run = await request(agent, "run")
        await loop.sock_sendall(agent, pack({"id": run["id"]}))
        for _ in range(20):
            await loop.sock_sendall(agent, pack({"stream": "c", "pipe": "stdout"}, b"x" * 200))
        told = [await first, *[line async for line in lines]]
        assert b"not read in time" in told[-1]
        assert (await request(agent, "interrupt"))["name"] == "c"
        assert turn.locked()
        await loop.sock_sendall(agent, pack({"stream": "c", "end": 0}))
        async with asyncio.timeout(WAIT_TIMEOUT_S), turn:
            pass


class _Session:
    """A session whose fork takes as long as one likes."""

    isolation, limits, has_relatives = Isolation.PROCESS, Limits(), False

    def __init__(self) -> None:
        self.forking, self.may_fork = asyncio.Event(), asyncio.Event()
        self.frozen: list[bool] = []
        self.close = AsyncMock()

    async def serve(self, _: object) -> None: ...

    async def fork_agent(self, *_: object) -> "_Session":
        self.forking.set()
        await self.may_fork.wait()
        self.has_relatives = True
        return _Session()

    def freeze(self, *, frozen: bool) -> None:
        self.frozen.append(frozen)


async def test_a_pause_waits_for_a_fork_and_a_fork_for_no_pause() -> None:
    async with guest_with_fake_agent() as (guest, _):
        session: Any = _Session()
        machine = ProcessMachine(guest, session, None)
        forking = asyncio.create_task(machine.fork([]))
        await session.forking.wait()
        pausing = asyncio.create_task(machine.freeze(frozen=True))
        await asyncio.sleep(0)
        session.may_fork.set()
        with pytest.raises(GuestError, match="has forks"):
            await pausing
        assert session.frozen == []
        await (await forking).close()
        session.has_relatives = False
        await machine.freeze(frozen=True)
        with pytest.raises(GuestError, match="is paused"):
            await machine.fork([])


async def test_a_sandbox_without_a_channel_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session()
    sandbox: Any = SimpleNamespace(open=AsyncMock(return_value=session))
    monkeypatch.setattr(
        asyncio, "open_unix_connection", AsyncMock(side_effect=OSError("too many open files"))
    )
    with pytest.raises(OSError, match="too many"):
        await ProcessMachine.start(sandbox, Limits())
    session.close.assert_awaited_once()


# ---- callers of one


async def asked_of_agent(path: str, body: bytes, ask: Any) -> int:
    """Return the status of a request whose client disconnects after it."""
    guest = SimpleNamespace(user="user", ask=ask)
    record: Any = SimpleNamespace(guest=guest)
    table: Any = None
    routes = [*envd.routes(lambda _: record), *interpreter.routes(lambda _: record, table)]
    app = Starlette(routes=routes)
    app.add_exception_handler(ApiError, _on_api_error)
    coming = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    statuses: list[int] = []

    async def receive() -> Any:
        if len(coming) == 1 and not statuses:  # it waits for an answer as long as there may be one
            await asyncio.sleep(0.05)
        return coming.pop(0) if len(coming) > 1 else coming[0]

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        await app(scope, receive, send)
    return statuses[0]


async def test_unread_input_is_dropped_when_its_client_leaves() -> None:
    ask = AsyncMock(side_effect=GuestError("resource_exhausted", "its pipe is full"))
    body = b'{"process": {"pid": 7}, "input": {"stdin": "eA=="}}'
    assert await asked_of_agent("/process.Process/SendInput", body, ask) == CLIENT_LEFT
    assert ask.await_count > 0


async def test_unread_streamed_input_is_dropped_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("UNREAD_INPUT_TIMEOUT_S", "BODY_SILENCE_TIMEOUT_S"):  # they are equal
        monkeypatch.setattr(envd, limit, 0.1)
    ask = AsyncMock(side_effect=GuestError("resource_exhausted", "its pipe is full"))
    frames = [{"start": {"process": {"pid": 7}}}, {"data": {"input": {"stdin": "eA=="}}}]
    bodies = [json.dumps({"event": frame}).encode() for frame in frames]
    body = b"".join(b"\0" + len(each).to_bytes(4, "big") + each for each in bodies)
    assert await asked_of_agent("/process.Process/StreamInput", body, ask) == 200
    assert ask.await_count > 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/process.Process/CloseStdin", b'{"process": [7]}'),
        ("/filesystem.Filesystem/ListDir", b'{"path": "/", "depth": 1e999}'),
        ("/execute", b'{"code": "1", "context_id": [1]}'),
    ],
)
async def test_malformed_requests_are_refused(path: str, body: bytes) -> None:
    assert await asked_of_agent(path, body, AsyncMock()) == 400


async def test_client_that_leaves_before_its_turn_releases_the_lock() -> None:
    guest = SimpleNamespace(ask=AsyncMock(return_value=({"cwd": "/"}, b"")))
    record: Any = SimpleNamespace(guest=guest, contexts={}, making=asyncio.Lock())
    app = Starlette(routes=interpreter.routes(lambda _: record, None))  # type: ignore[arg-type]
    coming = iter([{"type": "http.request", "body": b'{"code": "1"}'}])

    async def receive() -> Any:
        return next(coming, {"type": "http.disconnect"})

    async def send(_: Any) -> None:
        await asyncio.sleep(0)  # as where what was sent before is not read

    scope = {"type": "http", "method": "POST", "path": "/execute", "headers": [], "query_string": b""}
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        await app(scope, receive, send)
    _, turn = record.contexts["default"]
    assert not turn.locked()


SANDBOX = "0" * 20


def sandbox_app() -> SandboxApp:
    """An application with one sandbox."""
    settings = ServerSettings(tokens=(KEY,), allowed_hosts=("*",), max_body_bytes=1000)
    app = SandboxApp(settings, SandboxLimits())
    machine: Any = SimpleNamespace(guest=None)
    app.table._records[SANDBOX] = Record(SANDBOX, "key", "base", "token", 1.0, machine=machine)
    return app


@pytest.mark.parametrize("path", ["/", *sorted(envd.STREAMED)])
async def test_body_for_a_port_inside_is_limited_on_any_path(path: str) -> None:
    transport = httpx.ASGITransport(sandbox_app())
    async with httpx.AsyncClient(transport=transport, base_url=f"http://3000-{SANDBOX}.host") as client:
        assert (await client.post(path, content=b"x" * 1001)).status_code == 413


@pytest.mark.parametrize(
    ("host", "path", "status"),
    [
        ("host", "/sandboxes", 401),
        (f"49983-{SANDBOX}.host", "/process.Process/List", 401),
        (f"49983-{SANDBOX[:-1]}1.host", "/execute", 502),
        (f"3000-{SANDBOX[:-1]}1.host", "/", 502),
        ("host", f"/sandboxes/{SANDBOX[:-1]}1/ports/3000/", 502),
    ],
)
async def test_body_of_a_stranger_is_not_read(host: str, path: str, status: int) -> None:
    statuses: list[int] = []

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    headers = [(b"host", host.encode()), (b"content-length", b"1000"), (b"x-api-key", b"guessed")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await sandbox_app()({**scope, "headers": headers}, receive, send)
    assert statuses[0] == status


def test_images_are_allowed_by_pattern() -> None:
    limits = SandboxLimits(images=("my-env:*", "host:5000/team/*", "exact:1"))
    for name in ("my-env", "my-env:2", "host:5000/team/tool", "exact:1"):
        assert limits.image(name) == (name if ":" in name.rpartition("/")[2] else f"{name}:latest")
    for name in [
        "my-env2:1",
        "evil/my-env:1",
        "host:5000/team/tool:2",
        "exact",
        "exact:12",
        "my-env@sha256:00",
        "x",
    ]:
        with pytest.raises(ApiError, match="expected a template"):
            limits.image(name)
    assert SandboxLimits(images=("*",)).image("any@sha256:00") == "any@sha256:00"


async def test_resume_during_a_pause_leaves_the_sandbox_running() -> None:
    class Engine:
        """Yields once per call, and refuses to freeze or thaw twice."""

        frozen, close = False, AsyncMock()

        async def freeze(self, *, frozen: bool) -> None:
            await asyncio.sleep(0)
            assert self.frozen != frozen
            self.frozen = frozen

    engine: Any = Engine()
    table = SandboxTable(SandboxLimits())
    record = Record("id", "key", "image", "token", 1.0, machine=engine)
    await asyncio.gather(*(table.freeze(record, frozen=frozen) for frozen in (True, True, False)))
    assert (engine.frozen, record.paused) == (False, False)
    await table.freeze(record, frozen=True)
    await table.end(record)
    engine.close.assert_awaited_once()


async def test_sandboxes_are_limited_by_key_and_snapshots_are_its_own() -> None:
    table = SandboxTable(SandboxLimits(max_sandboxes_per_key=1))
    table._records[SANDBOX] = Record(SANDBOX, "key", "base", "token", 1.0, snapshot_of="another")
    with pytest.raises(ApiError, match="of one key"):
        await table.create("key", "base", 1.0, {})
    with pytest.raises(ApiError, match="expected a template"):
        await table.create("another", SANDBOX, 1.0, {})


async def test_container_is_of_the_image_that_was_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name moves to another image at every look; a container kept warm as one of the first is of the first."""
    looks, started = itertools.count(), list[Any]()

    def find_image(name: str) -> dict[str, Any]:
        return {"Id": name if name.startswith("sha256:") else f"sha256:{next(looks)}"}

    def start(*_: Any, image_id: str | None = None, **__: Any) -> Any:
        started.append(image_id)
        raise ImageNotFoundError("not now")

    monkeypatch.setattr(machines, "start_container", start)
    monkeypatch.setattr(DockerEngine, "find", lambda: SimpleNamespace(find_image=find_image))
    with pytest.raises(ImageNotFoundError):
        await WarmContainers(1).take("image", ContainerOptions())
    with pytest.raises(ImageNotFoundError):
        await ContainerMachine.start("image", ContainerOptions())
    assert started == ["sha256:0", "sha256:1"]


async def test_cancelled_start_removes_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go, removed = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        started.set()
        assert go.wait(WAIT_TIMEOUT_S)
        return SimpleNamespace(id="one", remove=removed.set)

    monkeypatch.setattr(machines, "start_container", slow)
    monkeypatch.setattr(DockerEngine, "find", lambda: SimpleNamespace(find_image=lambda _: None))
    starting = asyncio.create_task(ContainerMachine.start("image", ContainerOptions()))
    await asyncio.to_thread(started.wait, WAIT_TIMEOUT_S)
    starting.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert removed.is_set()


async def test_image_command_starts_with_the_variables_of_the_sandbox() -> None:
    guest, container = AsyncMock(Guest), SimpleNamespace(options=ContainerOptions())
    machine: Any = ContainerMachine(guest, None, container, {"Cmd": ["serve", "all"]})  # type: ignore[arg-type] - a fake
    await machine.begin({"GREETING": "aye"})
    (_, set_first, _), (op, arguments, fields) = guest.method_calls
    assert (set_first[0], op, arguments) == ({"GREETING": "aye"}, "ask", ("start",))
    assert (fields["cmd"], fields["args"]) == ("serve", ["all"])


# ---- forks, at each level


@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LSM])
async def test_forks_work_and_end_at_each_isolation_level(level: Isolation) -> None:
    limits = Limits(disk_bytes=8 << 20, file_bytes=8 << 20)

    async def run_code(machine: Machine, code: str) -> str:
        async with machine.guest.subscribed("c") as output:
            await machine.guest.ask("run", name="c", code=code, envs={})
            output_text = ""
            while (came := await output.take(WAIT_TIMEOUT_S)) is not None and "end" not in came[0]:
                output_text += came[1].decode()
            assert came is not None
            return output_text

    async with sandbox_at(level) as sandbox:
        before = descendants(sandbox.zygote_pid or 0)
        machine = await ProcessMachine.start(sandbox, limits)
        await machine.guest.wait_ready({}, WAIT_TIMEOUT_S)
        await machine.guest.ask("context", name="c", cwd="")
        await run_code(machine, "x = 1; open('file', 'w').write('y' * 3_000_000)")
        fork = await machine.fork(["c"])
        await fork.guest.wait_ready({}, WAIT_TIMEOUT_S)
        assert "3000001" in await run_code(fork, "x + len(open('file').read())")
        with pytest.raises(GuestError, match="not copied") as refused:  # the disk is shared
            await machine.fork(["c"])
        assert refused.value.code == "resource_exhausted"
        await machine.guest.ask("remove", path="file")
        await machine.guest.ask("run", name="c", code="while True: pass", envs={})
        with pytest.raises(GuestError, match="expected contexts") as refused:
            await machine.fork(["c"])
        assert refused.value.status == 409
        pids = descendants(sandbox.zygote_pid or 0) - before
        await machine.close()
        assert "42" in await run_code(fork, "6 * 7")
        # Whoever writes where nothing is to come from ends what is his, and nothing else.
        other = await ProcessMachine.start(sandbox, limits)
        await other.guest.wait_ready({}, WAIT_TIMEOUT_S)
        with suppress(GuestError):  # it may end before it answers
            await fork.guest.ask("run", name="c", code="import os; os.write(4, bytes(8))", envs={})
        await asyncio.wait_for(asyncio.shield(fork.guest.gone), WAIT_TIMEOUT_S)
        await fork.close()
        await other.guest.ask("stat", path=".")
        await other.close()
        await until(lambda: not alive(pids))
        assert sandbox.sessions == 0


@pytest.mark.slow
async def test_ended_forks_free_their_processes_and_live_forks_survive_garbage_collection() -> None:
    async with sandbox_at(Isolation.NAMESPACES) as sandbox:
        machine = await ProcessMachine.start(sandbox, Limits(processes=6))
        try:
            await machine.guest.wait_ready({}, WAIT_TIMEOUT_S)
            for _ in range(6):
                fork = await machine.fork([])
                await fork.guest.wait_ready({}, WAIT_TIMEOUT_S)
                await fork.close()
            await machine.guest.ask("context", name="c", cwd="")
            fork = await machine.fork(["c"])
            try:
                await fork.guest.wait_ready({}, WAIT_TIMEOUT_S)
                making = "import os\nfor number in range(900): os.makedirs(f'many/{number}')"
                await fork.guest.ask("run", name="c", code=making, envs={})
                for _ in range(20):  # each holds so much at once that the agent's collector runs
                    await fork.guest.ask("list", path=".", depth=2)
            finally:
                await fork.close()
        finally:
            await machine.close()


# ---- attacks, as cells of `run_code`

LOOSER = ("processes", "persistence", "memory", "cpu", "output", "channel")
"""Categories about limits of one execution, and about starting programs, which sandboxes may."""

ALLOWED = ("signals/kill-supervisor", "kernel_api/top-folder")
"""A cell's parent is the sandbox's own agent; programs may list the top folder, which at `namespaces` is their own."""

PLAYED = [each for each in CATALOGUE if each.act is None and not each.snapshot and each.title not in ALLOWED]
HELD = [each for each in PLAYED if each.holds <= FILTERED and each.category not in LOOSER]


@pytest.mark.parametrize(
    "attacks",
    [
        pytest.param([each for each in HELD if not each.slow and not each.alone][::12], id="some"),
        pytest.param(HELD, id="all", marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
@pytest.mark.interop
async def test_attacks_are_contained(service: Service, attacks: list[Any]) -> None:
    from e2b_code_interpreter import AsyncSandbox

    zygote = eventually(psutil.Process(service.process.pid).children)[0].pid  # it comes after the address
    breaches: dict[str, list[str]] = {}
    async with Surroundings() as around:
        host = {**around.host(zygote), "supervisor": service.process.pid, "isolation": "namespaces"}
        # Over descriptor 4 an interpreter gets those of its forks; what may be done with it is tested above.
        host["channels"] = [4]
        for attack in attacks:
            sandbox = await AsyncSandbox.create("base", timeout=120, **service.options())
            output = ""
            for cell in attack.cells:
                with suppress(Exception):  # its time is over, or the sandbox has ended
                    done = await sandbox.run_code(with_tools(cell, host), timeout=20)
                    output += "".join(done.logs.stdout + done.logs.stderr) + str(done.error)
            await sandbox.kill()
            if found := [line for line in output.splitlines() if MARK in line or SECRET in line]:
                breaches[attack.title] = found
        assert breaches == {}
        assert await asyncio.to_thread(around.damage) == []
    assert (await asyncio.to_thread(httpx.get, service.url + "/health")).json() == {"status": "healthy"}


# ---- the end of the service


def alive(pids: set[int]) -> set[int]:
    running_pids = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running_pids.add(pid)
    return running_pids


@pytest.mark.docker
@pytest.mark.interop
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_ended_service_leaves_nothing_behind(engine: DockerEngine, tmp_path: Path, signum: int) -> None:
    from e2b_code_interpreter import Sandbox

    with running_service(tmp_path, "--image", "python:*") as service:
        for template in ("base", IMAGE):
            sandbox = Sandbox.create(template, **service.options())
            sandbox.commands.run("sleep 600 & exec sleep 600", background=True)
            sandbox.run_code("x = 1")
            sandbox.files.write("x", "1")
        Sandbox.create("base", **service.options()).pause()
        pids = descendants(service.process.pid)
        mine = f"-{service.process.pid}-"

        def containers() -> list[str]:
            labelled = engine.list_labelled("ropewalk.owner")
            return [each["Id"] for each in labelled if mine in each["Labels"]["ropewalk.owner"]]

        assert len(pids) > 5
        assert len(containers()) == 1
        service.process.send_signal(signum)
        assert service.process.wait(WAIT_TIMEOUT_S) == (0 if signum == signal.SIGTERM else -signum)
        eventually(lambda: not alive(pids))
        eventually(lambda: not containers())
        assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


@pytest.mark.docker
async def test_warm_containers_are_handed_out_once(engine: DockerEngine) -> None:
    warm, machines_taken = WarmContainers(1), list[ContainerMachine]()
    options = ContainerOptions(memory="512m", network="bridge", read_only=False, tmpfs=())

    async def take(image: str = IMAGE, **fields: Any) -> tuple[ContainerMachine, ContainerMachine]:
        """Return the machine handed out, and the one that waits from then on."""
        machines_taken.append(await warm.take(image, options.model_copy(update=fields)))
        assert warm._filling is not None
        await warm._filling
        return machines_taken[-1], warm._ready[0][1]

    _, waits = await take()
    second, waits_then = await take()
    assert second is waits
    assert waits_then not in machines_taken
    # One of another kind is no substitute, and takes the place of the one that waits.
    third, of_its_kind = await take(network="none")
    assert (third in (waits, waits_then), waits_then.guest.gone.done()) == (False, True)
    await asyncio.to_thread(of_its_kind._container.remove)
    await asyncio.wait_for(asyncio.shield(of_its_kind.guest.gone), WAIT_TIMEOUT_S)
    fourth, left = await take(network="none")
    assert fourth is not of_its_kind
    # Nor is one of an image that was built again.
    named = {"repo": "ropewalk-test-warm", "tag": "latest"}
    engine.call("POST", f"/images/{IMAGE}/tag", query=named)
    try:
        _, old = await take("ropewalk-test-warm:latest")
        engine.call("POST", "/commit", query={"container": fourth._container.id, **named}, body={})
        new, waiting = await take("ropewalk-test-warm:latest")
        inspected = await asyncio.to_thread(engine.inspect, new._container.id)
        assert inspected["Image"] == engine.call("GET", "/images/ropewalk-test-warm:latest/json")["Id"]
        assert (old in (new, waiting), old.guest.gone.done()) == (False, True)
        assert len({each._container.id for each in machines_taken}) == 6
    finally:
        for machine in machines_taken:
            await machine.close()
        await warm.close()
        engine.call("DELETE", "/images/ropewalk-test-warm:latest", query={"force": "true"})
    ids = {each._container.id for each in (*machines_taken, waits_then, of_its_kind, left)}
    assert not ids & {each["Id"] for each in engine.list_labelled("ropewalk.owner")}


# ---- the provider


@pytest.mark.docker
@pytest.mark.interop
def test_server_in_a_sandbox_lives_as_long_as_its_owner(
    engine: DockerEngine, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv_core.providers.remote.RENEWALS", 20)
    remote = RemoteSandboxProvider(
        IMAGE, command=command(8123), port=8123, env_vars={"GREETING": "aye"}, lease_s=10, **service.options()
    )
    assert (remote.alive, remote.output(), remote.url) == (False, "", None)
    with remote:
        assert httpx.get(f"{remote.url}/health").json() == {"status": "healthy"}
        assert remote.alive
        assert remote.output() == "slim says aye\n"
        first = remote.sandbox_id
    assert (remote.alive, remote.url) == (False, None)
    with remote:  # it starts again, in another
        assert remote.sandbox_id != first
        headers = {"X-API-Key": KEY}
        one = f"{service.url}/sandboxes/{remote.sandbox_id}"
        first_end = httpx.get(one, headers=headers).json()["endAt"]
        eventually(lambda: httpx.get(one, headers=headers).json()["endAt"] > first_end)
        httpx.delete(one, headers=headers)
        eventually(lambda: not remote.alive)
        eventually(lambda: "is gone" in remote.output())


@pytest.mark.interop
def test_provider_reports_what_is_wrong(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxRefusedError, match="no-such-template") as refused:
        RemoteSandboxProvider("no-such-template", **service.options()).start()
    assert refused.value.status == 404
    with pytest.raises(SandboxRefusedError) as refused:
        RemoteSandboxProvider("base", **service.options("no-such-key-anywhere")).start()
    assert refused.value.status == 401
    nowhere = {**service.options(), "api_url": "http://127.0.0.1:9"}
    with pytest.raises(SandboxServiceUnavailableError):
        RemoteSandboxProvider("base", **nowhere).start()
    with pytest.raises(ServerStartError, match="healthy within"):  # a process sandbox has no network
        RemoteSandboxProvider("base", command=command(), start_timeout_s=1, **service.options()).start()
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    rows: list[dict[str, Any]] = [{}, {"api_key": "two words"}]
    rows += [{"api_key": KEY, "lease_s": 0}, {"api_key": KEY, "command": "x"}]
    for options in rows:
        with pytest.raises(ConfigurationError):
            RemoteSandboxProvider("base", **options)
