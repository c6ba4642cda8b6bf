"""What counts as an answer of /health, of servers of every kind."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from openenv_core.providers.health import status_of

NESTED = b"HTTP/1.0 200 OK\r\n\r\n" + b'{"a":' * 10_000 + b"}" * 10_000
BODY = b'{"status": "healthy", "more": {"a": 1}}'


@contextmanager
def answering(*pieces: bytes, hang: bool = False) -> Iterator[tuple[int, list[bytes]]]:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(65_536))
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.01)
                if hang:
                    ending.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], asked
        ending.set()
        thread.join(30)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.0 200 OK\r\n\r\n" + BODY,),
        (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 39\r\n\r\n", BODY[:9], BODY[9:-1], BODY[-1:]),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n27\r\n" + BODY + b"\r\n0\r\n\r\n",),
    ],
    ids=["plain", "in pieces", "chunked"],
)
@pytest.mark.parametrize("hang", [False, True], ids=["closing", "left open"])
def test_a_status_is_read_however_it_comes(pieces: tuple[bytes, ...], hang: bool) -> None:
    with answering(*pieces, hang=hang) as (port, asked):
        assert status_of(port, 20, "some-token") == "healthy"
        assert b"\r\nAuthorization: Bearer some-token\r\n" in asked[0]


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 401 Unauthorized\r\n\r\n{}", b"SSH-2.0-x\r\n", b"HTTP/1.0 200 OK\r\n\r\n[1]", NESTED],
    ids=["refused", "no HTTP", "a list", "deeper than is read"],
)
def test_what_is_no_status_is_shown(said: bytes) -> None:
    with answering(said) as (port, _), pytest.raises(ValueError, match="expected a status on /health"):
        status_of(port, 20)


def test_silence_is_no_answer() -> None:
    with answering() as (port, _), pytest.raises(ConnectionResetError, match="without an answer"):
        status_of(port, 20)
    with answering(b"HTTP/1.1 200", hang=True) as (port, _), pytest.raises(TimeoutError):
        status_of(port, 0.2)
