"""Hosts that join a run in progress: the controller's end of a membership, and the host's.

A host connects to the controller, proves that it knows the run's secret, and keeps the connection open for as long as
it belongs to the run. Messages are JSON objects, one per line:

    host:       {"secret": ..., "gpus": 0}
    controller: {"admitted": true, "notice_file": null}, once the run has started; or {"refused": "why"}
    host:       {"address": "tcp://..."} of the Monarch worker that it has started; the controller starts replicas there
    host:       {"leave": true}, if it gets a notice that it will be taken away
    controller: {"released": true}, when the run has left the host; or {"over": true}, at the end of the run

A connection that ends without the last message is a lost host, or a lost controller.

The secret guards joining alone: Monarch's own ports have no authentication.
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from openenv_core.backoff import Backoff
from openenv_core.guard import guard_command
from rl_bridge.config.monarch import visible_gpus
from rl_bridge.errors import ConfigError, RoleError
from rl_bridge.files import PARTIAL_SUFFIX
from rl_bridge.interface import find_free_port
from rl_bridge.metrics.status import format_address, parse_address
from rl_bridge.services.own_process import STOP_SIGNALS

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet

SECRET_FILE = "join.secret"
"""In a run's folder: what a host must know to join it."""
MAX_HOSTS = 1024
MAX_STRANGERS = 1024
"""Connections at a time that have not shown the secret; further ones are closed."""
MAX_LINE_BYTES = 8192
REQUEST_TIMEOUT_S = 30.0
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 2, 5
"""The kernel ends a connection to a host that is unreachable for about as many seconds as these make: 15."""


def make_secret(folder: Path) -> str:
    """Return the secret of the run in a folder, which only its owner can read; it is made once."""
    file = folder / SECRET_FILE
    if not file.exists():
        # Renamed when it is complete: one that is empty, because this process was killed, would admit anybody.
        partial = file.with_name(file.name + PARTIAL_SUFFIX)
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as output:
            output.write(secrets.token_hex(32))
        partial.replace(file)
    return file.read_text(encoding="ascii").strip()


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, or None if there is none any more: the connection has ended, or it is no message."""
    try:
        message = json.loads(await reader.readline())
    except (ValueError, RecursionError, OSError):  # also an overlong line, and an empty one at the end
        return None
    return message if isinstance(message, dict) else None


async def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    with contextlib.suppress(OSError):  # who is gone shows in reading
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


class JoinServer:
    """Lets hosts join a run, and takes out those that leave or are lost. An asynchronous context manager.

    It is opened before the fleet and closed after it: a host ends what runs there when its connection is closed. Hosts
    that come before `admit` wait for it.

    Args:
        host: The host to listen on.
        port: The port; 0 for any free one.
        secret: What hosts must know.
        notice_file: A file on a joined host whose appearance is a notice that the host will be taken away.
    """

    def __init__(self, host: str, port: int, secret: str, *, notice_file: str | None = None) -> None:
        self._bind_address = host, port
        self._secret = secret
        self._notice_file = notice_file
        self._fleet: asyncio.Future[Fleet] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._member_count = 0
        self._closed = False
        self.address = ""
        """tcp://HOST:PORT, once it listens."""

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(
                self._handle_connection, *self._bind_address, limit=MAX_LINE_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"expected to let hosts join at {format_address(*self._bind_address)} (monarch.master_addr, "
                f"join_port), got: {error.strerror or error}; choose another port"
            ) from error
        self.address = f"tcp://{format_address(*self._server.sockets[0].getsockname()[:2])}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @contextlib.asynccontextmanager
    async def admit(self, fleet: "Fleet") -> AsyncIterator[None]:
        """Let hosts join an open fleet within the block."""
        self._fleet.set_result(fleet)
        try:
            yield
        finally:
            self._fleet = asyncio.get_running_loop().create_future()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._closed:  # it was accepted just before, and nobody would cancel it
                await _send(writer, over=True)
                return
            if len(self._tasks) - self._member_count > MAX_STRANGERS:
                return
            _keep_alive(writer)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await _receive(reader)
            if (refusal := self._refusal(request)) is not None:
                await _send(writer, refused=refusal)
            elif request is not None:
                self._member_count += 1
                try:
                    await self._serve_host(request["gpus"], reader, writer)
                finally:
                    self._member_count -= 1
        except TimeoutError:
            pass
        except asyncio.CancelledError:  # not raised again: asyncio's streams would log it
            await _send(writer, over=True)
        finally:
            self._tasks.discard(task)
            writer.close()

    def _refusal(self, request: Mapping[str, Any] | None) -> str | None:
        match request:
            case {"secret": str(secret), "gpus": int()}:
                if not hmac.compare_digest(secret.encode(errors="replace"), self._secret.encode()):
                    return f"the secret is not that of this run; give its {SECRET_FILE} as --secret-file"
                if self._member_count >= MAX_HOSTS:
                    return f"{MAX_HOSTS} hosts have joined already"
                return None
            case _:
                return "the request needs a secret and a number of gpus"

    async def _serve_host(
        self, gpus: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Admit a host, wait until it leaves or is lost, and take it out."""
        message = asyncio.ensure_future(_receive(reader))
        try:
            admitted = self._fleet
            futures: set[asyncio.Future[Any]] = {message, admitted}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return
            fleet = admitted.result()
            await _send(writer, admitted=True, notice_file=self._notice_file)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                address = (await message or {}).get("address")
            if not isinstance(address, str):
                return
            message = asyncio.ensure_future(_receive(reader))
            try:
                number = await fleet.add_host(address, gpus)
            except RoleError as error:
                await _send(writer, refused=str(error))
                return
            notice = await message is not None
            await fleet.remove_host(number, notice=notice)
            if notice:
                await _send(writer, released=True)
        finally:
            message.cancel()


CONNECT_TIMEOUT_S = 10.0
CONTROLLER_TIMEOUT_S = 1800.0
"""How long a host looks for a controller, which may not have started yet."""
MIN_RETRY_S, MAX_RETRY_S = 0.5, 10.0
RELEASE_TIMEOUT_S = 60.0
"""How long a host that has had its notice waits for the controller to take it out."""
NOTICE_CHECK_INTERVAL_S = 1.0
WORKER_GRACE_S = 1.0


async def join_run(controller: str, secret_file: Path, address: str | None = None) -> None:
    """Have this host belong to a run until the run is over, or a notice says that the host will be taken away.

    A notice is SIGTERM, SIGINT, or the file of `monarch.preemption_notice_file`. After a lost connection the run's
    processes here are ended, and the host joins again.

    Args:
        controller: tcp://HOST:PORT of the run's `monarch.master_addr` and `join_port`.
        secret_file: The file with the run's secret.
        address: The address for the Monarch worker that is started here; by default the one by which this host reaches
            the controller, with a free port.

    Raises:
        ConfigError: An argument is invalid.
        RoleError: The controller refuses this host, is not found within `CONTROLLER_TIMEOUT_S`, or the worker ends.
    """
    host, port = parse_address(controller.removeprefix("tcp://"))
    loop, notice = asyncio.get_running_loop(), asyncio.Event()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, notice.set)
    backoff, deadline = Backoff(MIN_RETRY_S, MAX_RETRY_S), loop.time() + CONTROLLER_TIMEOUT_S
    while not notice.is_set():
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
            with contextlib.closing(writer):
                backoff.reset()
                if await _belong_to_run(reader, writer, secret_file, address, notice):
                    return
            deadline = loop.time() + CONTROLLER_TIMEOUT_S
            reason = "the connection was lost"
        except OSError as error:  # also a TimeoutError
            reason = str(error) or type(error).__name__
        if loop.time() > deadline:
            raise RoleError(f"expected a controller at {controller}, got: {reason}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff.next_s()):
                await notice.wait()


async def _belong_to_run(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret_file: Path,
    address: str | None,
    notice: asyncio.Event,
) -> bool:
    """Join by a connection, and stay; returns whether this ended in order, and not by the loss of the connection."""
    _keep_alive(writer)
    noticed, reply = asyncio.create_task(notice.wait()), asyncio.create_task(_receive(reader))
    tasks: list[asyncio.Task[Any]] = [noticed, reply]

    async def receive(*ends: asyncio.Task[Any], timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message, {} if something else ends the wait, or None at the end of the connection."""
        nonlocal reply
        await asyncio.wait({reply, *ends}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            return {}
        message = reply.result()
        tasks.append(reply := asyncio.create_task(_receive(reader)))
        if message is not None and "refused" in message:
            raise RoleError(f"the controller refuses this host: {message['refused']}")
        return message

    try:
        await _send(writer, secret=_read_secret(secret_file), gpus=len(visible_gpus()))
        message = await receive(noticed)
        if not message or not message.get("admitted"):
            return message is not None
        if message["notice_file"] is not None:
            tasks.append(asyncio.create_task(_wait_for_file(Path(message["notice_file"]), notice)))
        if address is None:
            own_host = writer.get_extra_info("sockname")[0]
            address = f"tcp://{format_address(own_host, find_free_port(own_host))}"
        async with _run_worker(address) as worker:
            tasks.append(worker)
            await _send(writer, address=address)
            print(f"worker: joining the run as {address}", flush=True)  # noqa: T201
            message = await receive(noticed, worker)
            if noticed.done() and message == {}:
                print("worker: leaving the run after a notice", flush=True)  # noqa: T201
                await _send(writer, leave=True)
                await receive(worker, timeout_s=RELEASE_TIMEOUT_S)
            elif worker.done():
                raise RoleError(f"the Monarch worker {address} ended with status {worker.result()}")
            return message is not None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _run_worker(address: str) -> AsyncIterator[asyncio.Task[int]]:
    """Run a Monarch worker within the block, and end it with all that it has started; yields its end."""
    command = [sys.executable, "-m", "rl_bridge.services.worker", address]
    guard = await asyncio.create_subprocess_exec(
        *guard_command(command, grace_s=WORKER_GRACE_S, everything=True), stdin=asyncio.subprocess.PIPE
    )
    assert guard.stdin is not None
    try:
        yield asyncio.create_task(guard.wait())
    finally:
        guard.stdin.close()  # as happens if this process is killed
        await guard.wait()


async def _wait_for_file(file: Path, found: asyncio.Event) -> None:
    while not await asyncio.to_thread(file.exists):  # noqa: ASYNC110 - another program makes it
        await asyncio.sleep(NOTICE_CHECK_INTERVAL_S)
    found.set()


def _read_secret(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--secret-file: cannot read {str(file)!r}: {error}") from error
