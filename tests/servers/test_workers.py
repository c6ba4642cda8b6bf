"""Several worker processes that act as one server. Real processes, really killed."""

import asyncio
import errno
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from counter import Add
from counter_client import CounterEnv
from faulty_proxy import faulty_proxy
from serve_process import SUPPORT, ServeProcess, eventually, gone, run_refused_server, serve
from server_apps import action, mcp
from serving import ask, request, socket_to, wait_close_code
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from openenv_core import GenericEnvClient
from servers.fleet.forwarder import worker_of
from servers.fleet.peers import UnixPeers
from servers.fleet.supervisor import Supervisor, _Worker
from servers.fleet.worker import READY

TOKEN = "correct-horse-battery-staple"
OTHER = "another-token-of-good-length"
WORKERS = 2


@pytest.fixture(scope="module")
def fleet() -> Iterator[ServeProcess]:
    with serve("--workers", str(WORKERS), "--web") as server:
        yield server


def workers(server: ServeProcess) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def sockets_of(supervisor: psutil.Process) -> dict[Path, psutil.Process]:
    """Return the private sockets, in order, with their worker processes."""
    sockets = {
        Path(connection.laddr): worker
        for worker in supervisor.children()
        for connection in worker.net_connections("unix")
        if str(connection.laddr).endswith(".sock")
    }
    return dict(sorted(sockets.items()))


def private_sockets(server: ServeProcess) -> dict[Path, psutil.Process]:
    return sockets_of(psutil.Process(server.process.pid))


def folder(server: ServeProcess) -> Path:
    (folder,) = {path.parent for path in private_sockets(server)}
    return folder


def session_ids_of_workers(prefix: str) -> list[str]:
    """Return a session id of each worker."""
    session_ids: dict[int, str] = {}
    number = 0
    while len(session_ids) < WORKERS:
        session_ids.setdefault(worker_of(f"{prefix}-{number}", WORKERS), f"{prefix}-{number}")
        number += 1
    return [session_ids[worker] for worker in range(WORKERS)]


def reset(server: ServeProcess, session: str, **headers: str) -> int:
    return server.request("POST", "/reset", {"seed": 1}, X_OpenEnv_Session=session, **headers)[0]


@pytest.mark.slow
async def test_plain_http_session_is_found_from_any_worker(fleet: ServeProcess) -> None:
    for session in session_ids_of_workers("http"):
        for _ in range(4):  # each on a connection of its own
            assert reset(fleet, session) == 200
            for total in (3, 5):
                status, reply = fleet.request("POST", "/step", action(), X_OpenEnv_Session=session)
                assert (status, reply["observation"]["total"]) == (200, total)
            # Other sites of the same host leave cookies that a strict reader would not take.
            for others in ("other=1", 'bad[name]=1; "odd', "{json}={}"):
                status, state = fleet.get("/state", Cookie=f"{others}; openenv_session={session}")
                assert (status, state["step_count"]) == (200, 2)


@pytest.mark.slow
async def test_sessions_of_a_killed_worker_are_replayed() -> None:
    with serve("--workers", str(WORKERS)) as server:
        async with AsyncExitStack() as stack:
            url = f"http://{server.address}"
            clients = [await stack.enter_async_context(CounterEnv(url)) for _ in range(8)]
            for seed, client in enumerate(clients):
                await client.reset(seed=0, start=seed - 8)
                await client.step(Add(amount=1))
            for worker in workers(server)[:1]:
                worker.kill()
            for seed, client in enumerate(clients):
                assert (await client.step(Add(amount=1))).observation.total == seed - 6
                assert (await client.state()).step_count == 2


@pytest.mark.soak
async def test_server_chosen_ids_name_their_worker(fleet: ServeProcess) -> None:
    for _ in range(8):
        status, reply = fleet.request("POST", "/mcp", mcp("openenv/session/create"))
        assert status == 200
        session = reply["result"]["session_id"]
        async with socket_to(fleet.address, f"?session_id={session}") as client:
            assert (await ask(client, {"type": "reset", "data": {"seed": 4}}))["data"]["observation"][
                "total"
            ] == 4
        for _ in range(4):
            listing = fleet.request("POST", "/mcp", mcp("tools/list", session_id=session))[1]
            assert "unknown session" not in json.dumps(listing).lower()
        # The id is found however it is escaped.
        close = json.dumps(mcp("openenv/session/close", session_id=session)).replace("/", "\\/")
        closed = await request(fleet.address, "POST", "/mcp", close.replace("session_id", "session\\u005fid"))
        assert closed.json()["result"] == {"session_id": session, "closed": True}
        async with socket_to(fleet.address, f"?session_id={session}") as client:
            assert "Unknown session_id" in json.loads(await client.recv())["data"]["message"]


@pytest.mark.slow
async def test_session_is_resumed_at_its_worker_from_any_connection(
    fleet: ServeProcess,
) -> None:
    async with faulty_proxy(fleet.address) as proxy, GenericEnvClient(proxy.url) as client:
        await client.reset(seed=1)
        for _ in range(8):  # a kernel that shares connections out by chance sends half of them to the other
            proxy.cut()
            await client.state()
        await client.step({"amount": 1})
        assert (await client.state())["total"] == 2
        assert proxy.connections == 9


@pytest.mark.soak
async def test_sockets_and_bodies_are_forwarded_with_their_limits(fleet: ServeProcess) -> None:
    for session in session_ids_of_workers("attach"):
        assert reset(fleet, session) == 200
        for _ in range(4):
            async with socket_to(fleet.address, f"?session_id={session}") as client:
                assert (await ask(client, {"type": "state"}))["data"]["step_count"] == 0
                assert (await ask(client, "no json"))["data"]["code"] == "INVALID_JSON"
                assert (await ask(client, b"\x00"))["type"] == "error"
                await end_session(client)
                assert client.close_code == 1000
        async with socket_to(fleet.address, f"?session_id={session}") as client:
            large = {"type": "step", "data": {"amount": 1, "metadata": {"pad": "x" * 2_000_000}}}
            assert (await ask(client, large))["type"] == "observation"
        assert fleet.request("POST", "/step", action(), X_OpenEnv_Session=session)[0] == 200
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
            head = f"POST /step HTTP/1.1\r\nHost: localhost\r\nX-OpenEnv-Session: {session}\r\n"
            writer.write(f"{head}Content-Length: 52428800\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            writer.close()


async def test_page_session_is_shared_by_all_workers(fleet: ServeProcess) -> None:
    assert fleet.request("POST", "/web/reset", {"seed": 0})[0] == 200
    totals = [fleet.request("POST", "/web/step", {"action": {"amount": 1}})[1] for _ in range(8)]
    assert [reply["observation"]["total"] for reply in totals] == [1, 2, 3, 4, 5, 6, 7, 8]
    async with socket_to(fleet.address, path="/ws/ui") as watching:
        assert len((await ask(watching, "here"))["episode_state"]["action_logs"]) == 8


@pytest.mark.soak
def test_forks_are_made_at_the_worker_of_the_session(fleet: ServeProcess) -> None:
    with CounterEnv(f"http://{fleet.address}").sync() as client:
        client.reset(seed=1)
        forks = client.fork(6)
        totals = [fork.step(Add(amount=one)).observation.total for one, fork in enumerate(forks)]
        assert totals == [1, 2, 3, 4, 5, 6]
        assert client.state().total == 1


@pytest.mark.slow
async def test_cap_holds_over_all_workers() -> None:
    with serve("--workers", "2", "--max-sessions", "6", "--max-wait", "0") as server:
        for _ in range(2):  # and the slots come back
            outcomes = await asyncio.gather(*(first_reply(server) for _ in range(40)))
            kept = [client for client, reply in outcomes if reply["type"] == "state"]
            refused = [reply["data"] for _, reply in outcomes if reply["type"] == "error"]
            assert len(kept) == 6
            assert {(data["code"], data["max_sessions"]) for data in refused} == {("CAPACITY_REACHED", 6)}
            await asyncio.gather(*(client.close() for client, _ in outcomes))
            await wait_for_free_slots(server)


async def first_reply(server: ServeProcess, token: str = "") -> tuple[Any, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    client = await connect(
        f"ws://{server.address}/ws", additional_headers=headers, compression=None, proxy=None
    )
    with suppress(ConnectionClosed):  # a refusal comes unasked, and waits to be read
        await client.send(json.dumps({"type": "state"}))
    return client, json.loads(await asyncio.wait_for(client.recv(), 60))


async def wait_for_free_slots(server: ServeProcess) -> None:
    """Wait until closed sockets have freed their slots."""
    async with asyncio.timeout(60):
        while True:
            outcomes = await asyncio.gather(*(first_reply(server) for _ in range(6)))
            await asyncio.gather(*(client.close() for client, _ in outcomes))
            if all(reply["type"] == "state" for _, reply in outcomes):
                return
            await asyncio.sleep(0.05)


@pytest.mark.soak
async def test_cap_per_token_holds_over_all_workers() -> None:
    with serve(
        "--workers", "2", "--max-sessions-per-token", "3", "--token", TOKEN, "--token", OTHER
    ) as server:
        for token in (TOKEN, OTHER):
            outcomes = await asyncio.gather(*(first_reply(server, token) for _ in range(12)))
            assert sum(reply["type"] == "state" for _, reply in outcomes) == 3
            await asyncio.gather(*(client.close() for client, reply in outcomes if reply["type"] == "error"))


@pytest.mark.soak
async def test_exclusive_environment_has_one_session_per_worker() -> None:
    with serve("--workers", "2", "--max-sessions", "2", app="solo:app") as server:
        for _ in range(4):  # whichever worker the connections meet
            outcomes = [await first_reply(server) for _ in range(3)]
            kinds = [reply["type"] for _, reply in outcomes]
            assert kinds == ["state", "state", "error"]
            await asyncio.gather(*(end_session(client) for client, _ in outcomes))


async def end_session(client: Any) -> None:
    """End a session; when its socket closes, its slot is free."""
    with suppress(ConnectionClosed):
        await client.send(json.dumps({"type": "close"}))
    await asyncio.wait_for(client.wait_closed(), 60)


@pytest.mark.soak
def test_workers_that_cannot_start_end_the_fleet() -> None:
    status, output = run_refused_server("--workers", "2", app="stillborn:app")
    assert status == 1
    assert "these are its last words" in output
    assert "before it was healthy" in output


@pytest.mark.slow
async def test_worker_start_is_retried_when_no_process_is_available() -> None:
    lives = [None, BlockingIOError(errno.EAGAIN, "no more processes"), None]

    class Shorthanded(Supervisor):
        async def _run_worker(self, worker: Any) -> None:
            if (error := lives.pop(0)) is not None:
                raise error
            worker.process, worker.output = SimpleNamespace(returncode=-9), READY
            if not lives:
                self._stopping.set()

    plan: Any = SimpleNamespace(settings=SimpleNamespace(tokens=()), index=0)
    cleared: list[int] = []
    table: Any = SimpleNamespace(clear=cleared.append)
    await asyncio.wait_for(Shorthanded(plan, [], lambda: None)._keep_running(_Worker(plan=plan), table), 60)
    assert cleared == [0, 0]


@pytest.mark.slow
async def test_killed_worker_is_replaced_and_frees_its_slots() -> None:
    with serve("--workers", "2", "--max-sessions", "4", "--max-wait", "0") as server:
        clients = [(await first_reply(server))[0] for _ in range(4)]
        victims = workers(server)
        for victim in victims:
            victim.kill()
        for client in clients:
            await asyncio.wait_for(client.wait_closed(), 60)
        eventually(lambda: len(workers(server)) == 2 and not set(workers(server)) & set(victims))
        async with asyncio.timeout(30):
            while True:
                outcomes = await asyncio.gather(
                    *(first_reply(server) for _ in range(5)), return_exceptions=True
                )
                answered = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
                await asyncio.gather(*(client.close() for client, _ in answered))
                if sum(reply["type"] == "state" for _, reply in answered) == 4:
                    break
                await asyncio.sleep(0.05)
        assert "it is restarted" in server.output


@pytest.mark.soak
async def test_socket_of_a_killed_worker_gets_a_session_error() -> None:
    """So does a request that kills it, unless the caller's own connection was with that worker."""
    with serve("--workers", "2", app="solo:deadly") as server:
        told: set[str] = set()
        for attempt in range(30):
            session = session_ids_of_workers(f"dies-{attempt}")[attempt % 2]
            with suppress(OSError, ConnectionClosed, InvalidStatus):
                if reset(server, session) != 200:
                    await asyncio.sleep(0.2)  # the next worker is starting
                    continue
                async with socket_to(server.address, f"?session_id={session}") as client:
                    with suppress(OSError):
                        reply = server.request("POST", "/step", action(1), X_OpenEnv_Session=session)
                        assert (reply[0], "sessions are gone" in reply[1]["detail"]) == (502, True)
                        told.add("request")
                    data = json.loads(await asyncio.wait_for(client.recv(), 60))["data"]
                    assert (data["code"], "gone" in data["message"]) == ("SESSION_ERROR", True)
                    assert await wait_close_code(client) == 1011
                    told.add("socket")
            if len(told) == 2:
                break
        assert len(told) == 2


@pytest.mark.slow
def test_workers_end_when_their_supervisor_is_killed() -> None:
    with serve("--workers", "2", "--drain", "0.5") as server:
        family, private = server.family, folder(server)
        assert stat.S_IMODE(os.stat(private).st_mode) == 0o700
        server.process.kill()
        server.ended()
        eventually(lambda: all(gone(process) for process in family))
        assert not private.exists(), server.output


@pytest.mark.soak
def test_starting_worker_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    late = tmp_path / "late"
    with serve("--workers", "2", "--drain", "0.5", app="late:app", LATE_WHILE=str(late)) as server:
        eventually(lambda: len(private_sockets(server)) == 2)
        private = folder(server)
        victim = next(iter(private_sockets(server).values()))
        late.touch()
        victim.kill()
        eventually(lambda: len(workers(server)) == 2 and victim not in workers(server))
        family = server.family
        server.process.kill()
        eventually(lambda: not private.exists())  # with the socket that was left
        late.unlink()
        server.ended()
        eventually(lambda: all(gone(process) for process in family))
    assert "Traceback" not in server.output


@pytest.mark.soak
async def test_hanging_workers_leave_nothing_when_their_supervisor_is_killed() -> None:
    with serve("--workers", "2", "--drain", "0.5", app="solo:frozen") as server:
        family, private = server.family, folder(server)
        async with connect(f"ws://{server.address}/ws", compression=None, proxy=None) as client:
            await client.send(json.dumps({"type": "step", "data": {"amount": 0}}))
            await asyncio.to_thread(eventually, lambda: "it keeps the loop" in server.output)
            server.process.kill()
            await asyncio.to_thread(eventually, lambda: all(gone(process) for process in family))
            await asyncio.to_thread(server.ended)
        assert "something still hung" in server.output
        assert not private.exists()


@pytest.mark.soak
def test_workers_on_a_unix_socket_find_sessions(tmp_path: Path) -> None:
    """Callers come over a Unix socket, as the workers themselves do to each other."""
    public = tmp_path / "public"

    def status(path: Path, method: str, target: str, session: str = "") -> int:
        headers = {"X-OpenEnv-Session": session} if session else {}
        transport = httpx.HTTPTransport(uds=str(path), verify=False)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=30) as client:
            return client.request(method, target, headers=headers).status_code

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(public)) == 0

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(public))
        fd = listener.fileno()
        arguments = ["serve", "counter:app", "--fd", str(fd), "--workers", str(WORKERS)]
        command = [sys.executable, "-m", "openenv_core.cli", *arguments]
        process = subprocess.Popen(command, cwd=SUPPORT, pass_fds=(fd,), start_new_session=True)
    supervisor = psutil.Process(process.pid)
    try:
        eventually(lambda: len(sockets_of(supervisor)) == WORKERS and listens())
        private = list(sockets_of(supervisor))
        # With so many, some come in at a worker that is not theirs, however the connections are dealt out.
        for session in (f"unix-{number}" for number in range(12)):
            assert status(public, "POST", "/reset", session) == 200
            assert status(private[worker_of(session, WORKERS)], "GET", "/state", session) == 200
            assert status(public, "GET", "/state", session) == 200
        process.terminate()
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            for left in supervisor.children(recursive=True):
                left.kill()
            process.kill()
            process.wait()


@pytest.mark.parametrize("subprotocol", ["ropewalk.v1", None])
async def test_forwarded_socket_carries_the_workers_headers_and_its_death(
    tmp_path: Path, subprotocol: Any
) -> None:
    path, sent_messages = str(tmp_path / "worker.sock"), asyncio.Queue[Any]()
    begin = [{"type": "websocket.connect"}]

    async def die(connection: ServerConnection) -> None:
        connection.transport.abort()

    async def receive() -> Any:
        if begin:
            return begin.pop()
        return await asyncio.get_running_loop().create_future()

    offered = [subprotocol] if subprotocol else None
    scope = {"raw_path": b"/ws", "headers": [(b"host", b"h")], "subprotocols": offered}
    header = {"X-OpenEnv-Deterministic": "true"}

    def declare(connection: ServerConnection, request: Any, response: Any) -> None:
        response.headers.update(header)

    async with unix_serve(die, path, subprotocols=offered, process_response=declare):
        await UnixPeers(lambda _: path, 20.0).socket(0, scope, receive, sent_messages.put)
    accepted = sent_messages.get_nowait()
    assert accepted["subprotocol"] == subprotocol
    assert accepted["headers"] == [(b"x-openenv-deterministic", b"true")]
    if subprotocol is None:  # who cannot come back is told
        assert "its sessions are gone" in sent_messages.get_nowait()["text"]
    assert sent_messages.get_nowait() == {"type": "websocket.close", "code": 1011}


async def test_close_of_a_client_reaches_its_worker_although_replies_do_not_reach_the_client(
    tmp_path: Path,
) -> None:
    """A worker may write before it reads: a relay that breaks off would have it keep the sessions for a resume."""
    path, has_left = str(tmp_path / "worker.sock"), asyncio.Event()
    begin = [{"type": "websocket.connect"}]
    code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def reply(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await connection.send("one")
        await has_left.wait()
        for _ in range(20):  # until the relay has noticed
            await asyncio.sleep(0)
        await connection.send("two")
        connection.transport.resume_reading()
        await connection.wait_closed()
        code.set_result(connection.close_code)

    async def receive() -> Any:
        if begin:
            return begin.pop()
        await has_left.wait()
        return {"type": "websocket.disconnect", "code": 1000, "reason": ""}

    async def send(message: Any) -> None:
        if message["type"] == "websocket.send":
            has_left.set()
            raise OSError("the client has closed")

    scope = {"raw_path": b"/ws", "headers": [(b"host", b"h")]}
    async with unix_serve(reply, path):
        await UnixPeers(lambda _: path, 20.0).socket(0, scope, receive, send)
        assert await asyncio.wait_for(code, 30) == 1000


async def ask_peer(
    peers: UnixPeers, *headers: tuple[bytes, bytes], on_body: Callable[[], None] = lambda: None
) -> list[Any]:
    """Return the messages with which a worker's response to a request is sent to the client."""
    messages: list[Any] = []
    scope = {"type": "http", "method": "GET", "raw_path": b"/", "headers": [(b"host", b"h"), *headers]}

    begin = [{"type": "http.request"}]

    async def receive() -> Any:
        return begin.pop() if begin else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        messages.append(message)
        if message.get("body"):
            on_body()

    await peers.http(0, scope, receive, send)
    await peers.close()
    return messages


@asynccontextmanager
async def answering(
    path: Path, first: bytes, rest: bytes = b"", after: asyncio.Event | None = None
) -> AsyncIterator[UnixPeers]:
    """Serve a worker that answers with headers and a body in two parts, the second after an event."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + first)
        if after is not None:
            await after.wait()
        writer.write(rest)
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        yield UnixPeers(lambda _: str(path), 20.0)


async def test_peer_that_is_not_there_is_a_bad_gateway(tmp_path: Path) -> None:
    assert (await ask_peer(UnixPeers(lambda _: str(tmp_path / "never.sock"), 20.0)))[0]["status"] == 502


@pytest.mark.parametrize("breaks", [False, True])
async def test_response_is_passed_on_as_it_comes_and_not_completed_if_it_breaks(
    tmp_path: Path, breaks: bool
) -> None:
    has_piece, rest = asyncio.Event(), b"" if breaks else b"ha"
    async with answering(tmp_path / "sock", b"content-length: 4\r\n\r\nha", rest, has_piece) as peers:
        head, *pieces = await ask_peer(peers, on_body=has_piece.set)
    assert (b"content-length", b"4") in head["headers"]
    assert b"".join(piece["body"] for piece in pieces) == b"ha" + rest
    assert pieces[-1].get("more_body", False) is breaks


async def test_length_of_a_chunked_response_is_not_passed_on(tmp_path: Path) -> None:
    headers = b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n"
    async with answering(tmp_path / "sock", headers, b"2\r\nhi\r\n0\r\n\r\n") as peers:
        head, *pieces = await ask_peer(peers)
    assert head["headers"] == []
    assert b"".join(piece["body"] for piece in pieces) == b"hi"


async def test_client_may_read_a_response_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, now, is_read = asyncio.get_running_loop(), asyncio.get_running_loop().time, asyncio.Event()

    def read_for_an_hour() -> None:
        monkeypatch.setattr(loop, "time", lambda: now() + 3600.0)
        is_read.set()

    async with answering(tmp_path / "sock", b"content-length: 4\r\n\r\nha", b"ha", is_read) as peers:
        messages = await ask_peer(peers, on_body=read_for_an_hour)
    assert b"".join(message["body"] for message in messages[1:]) == b"haha"
    assert not messages[-1].get("more_body")


async def test_worker_may_let_a_request_wait_for_a_slot_as_long_as_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servers.fleet.peers._DEADLINE_MARGIN_S", 0.0)
    path, free, hurried = tmp_path / "sock", asyncio.Event(), UnixPeers(lambda _: str(path), 0.01)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await free.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        assert (await ask_peer(hurried, (b"prefer", b"wait=0")))[0]["status"] == 502
        asyncio.get_running_loop().call_later(0.1, free.set)
        assert (await ask_peer(hurried, (b"prefer", b"wait=60")))[0]["status"] == 200
