"""HTTP requests that no library would send: each gets its status, or ends only its own connection."""

from collections.abc import Iterator

import pytest
from serve_process import ServeProcess, serve

HOST = b"Host: localhost\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
KEY = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n"
BODY = b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def get(path: bytes, *headers: bytes, version: bytes = b"1.1", host: bytes = HOST) -> bytes:
    return b"GET " + path + b" HTTP/" + version + b"\r\n" + host + b"".join(headers) + b"\r\n"


def post(path: bytes, *headers: bytes, rest: bytes = BODY) -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + b"".join(headers) + rest


CASES: dict[str, tuple[bytes, set[int]]] = {
    # Who is meant
    "two hosts": (get(b"/health", HOST), {400}),
    "no host": (get(b"/health", host=b""), {400}),
    "HTTP/1.0": (get(b"/health", version=b"1.0"), {200}),
    "HTTP/0.9": (b"GET /health\r\n\r\n", {400}),
    "a host with a user": (get(b"/health", host=b"Host: a@localhost\r\n"), {400}),
    "a foreign host": (get(b"/health", host=b"Host: evil.example\r\n"), {421}),
    "a forwarded host": (get(b"/health", b"X-Forwarded-Host: evil.example\r\n"), {200}),
    "a socket by a whole address": (get(b"http://localhost/ws", UPGRADE, KEY), {400, 403, 404}),
    "a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404, 405}),
    # Where
    "up and up, in disguise": (get(b"/..%2f..%2fetc%2fpasswd"), {404}),
    "up to a route": (get(b"/..%2fechoes/splits"), {404}),
    "a zero byte": (get(b"/\x00"), {400}),
    "a method nobody knows": (b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n", {405}),
    "TRACE": (b"TRACE /health HTTP/1.1\r\n" + HOST + b"\r\n", {405}),
    # Sockets
    "a socket by POST": (post(b"/ws", UPGRADE, KEY, rest=b"Content-Length: 0\r\n\r\n"), {400, 405}),
    "a socket without a key": (get(b"/ws", UPGRADE), {400}),
    "a socket with two keys": (get(b"/ws", UPGRADE, KEY, KEY), {400}),
    "a socket where none is": (get(b"/health", UPGRADE, KEY), {403, 404}),
    "a socket without the upgrade": (get(b"/ws"), {404, 426}),
    "a socket with a body": (get(b"/ws", UPGRADE, KEY, b"Content-Length: 5\r\n") + b"xxxxx", {400}),
    "a socket with a body in chunks": (
        get(b"/ws", UPGRADE, KEY, b"Transfer-Encoding: chunked\r\n") + b"5\r\nabcde\r\n0\r\n\r\n",
        {400},
    ),
    "a socket with a name without end": (
        get(b"/ws?session_id=" + b"a" * 30_000, UPGRADE, KEY),
        {101, 414, 431},
    ),
    "a socket with a name of bytes": (get(b"/ws?session_id=%ff%00%ed%a0%80", UPGRADE, KEY), {101}),
    # Sessions
    "two sessions": (
        post(b"/reset", b"X-OpenEnv-Session: a\r\n", b"X-OpenEnv-Session: b\r\n"),
        {422},
    ),
    "two sessions in one": (post(b"/reset", b"X-OpenEnv-Session: a, b\r\n"), {422}),
    "a session of bytes": (post(b"/reset", b"X-OpenEnv-Session: \xff\xfe\r\n"), {422}),
    "a session over two lines": (post(b"/reset", b"X-OpenEnv-Session: a\r\n b\r\n"), {400, 422}),
    "a path for a session": (post(b"/reset", b"X-OpenEnv-Session: ../../a\r\n"), {422}),
    "a huge cookie": (post(b"/reset", b"Cookie: openenv_session=" + b"a" * 20_000 + b"\r\n"), {422, 431}),
    "odd cookies": (post(b"/reset", b'Cookie: ;;;=;openenv_session;a[b]="{;\xff=\xfe\r\n'), {200, 422}),
    # Bodies
    "two ways to tell the length": (
        post(b"/reset", b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", rest=b"\r\n0\r\n\r\n"),
        {400},
    ),
    "a transfer coding that nobody takes": (
        post(b"/reset", b"Transfer-Encoding: gzip, chunked\r\n", rest=b"\r\n0\r\n\r\n"),
        {400, 501},
    ),
    "two lengths": (post(b"/reset", b"Content-Length: 3\r\n"), {400}),
    "a chunk that is none": (post(b"/reset", b"Transfer-Encoding: chunked\r\n", rest=b"\r\nzz\r\n"), {400}),
    "JSON in UTF-16": (
        post(b"/echoes/tasks", rest=b"Content-Length: 30\r\n\r\n" + '{"split":"ab"}'.encode("utf-16")),
        {400, 422},
    ),
    "half a surrogate in JSON": (
        post(b"/echoes/tasks", rest=b'Content-Length: 18\r\n\r\n{"split":"\\ud800"}'),
        {400, 422},
    ),
    "a form": (
        post(
            b"/echoes/tasks",
            rest=b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 7\r\n\r\nsplit=a",
        ),
        {415, 422},
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serve("--max-sessions", "1000", app="fuzz_app:app") as running:
        yield running
        assert "Traceback" not in running.output, running.output


def answer_to(server: ServeProcess, data: bytes) -> bytes:
    """Return the head of the response, and its body if it is the connection's last; empty if the connection ended."""
    with server.connect() as connection:
        connection.sendall(data)
        answer = b""
        while b"\r\n\r\n" not in answer or b"connection: close" in answer.lower():
            try:
                part = connection.recv(65_536)
            except ConnectionError:
                part = b""
            if not part:
                break
            answer += part
    return answer


def test_odd_requests_get_their_status(server: ServeProcess) -> None:
    for name, (data, statuses) in CASES.items():
        answer = answer_to(server, data)
        assert int(answer.split()[1]) in statuses, (name, answer)
        for leak in (b"Traceback", b".py", b"site-packages", b"root:"):
            assert leak not in answer, name
        assert server.get("/health") == (200, {"status": "healthy"}), name
