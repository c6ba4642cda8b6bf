"""The server of the page: which requests it answers, and which it refuses."""

import socket
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rl_bridge.rollouts_page import server
from rl_bridge.rollouts_page.server import MAX_CALLERS, policy
from tests.rl_bridge.rollouts_page.page_fixtures import conversation, keep, served


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return keep(tmp_path / "seven", conversation())


@pytest.fixture
def client(run: Path) -> Iterator[httpx.Client]:
    with served(run) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as asking:
        yield asking


def test_page_and_records(client: httpx.Client, run: Path) -> None:
    page = client.get("")
    assert page.status_code == 200
    assert page.headers["Content-Security-Policy"] == policy(served=True)
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert "<title>seven" in page.text
    records = client.get("records.jsonl")
    assert records.content == (run / "rollouts" / "000001.jsonl").read_bytes()
    assert records.headers["Content-Type"].startswith("application/x-ndjson")
    assert client.head("").content == b""


def test_nothing_else_is_served_or_taken(client: httpx.Client) -> None:
    for path in ("../seven/config.yaml", "rollouts/000001.jsonl", "records.jsonl?x", "%2e%2e/%2e"):
        assert client.get(path).status_code == 404
    assert client.post("records.jsonl", content=b"{}").status_code == 501


def test_each_server_has_a_secret_address_of_its_own(run: Path) -> None:
    with served(run) as one, served(run) as other:
        assert urlsplit(one).path != urlsplit(other).path
        assert len(urlsplit(one).path) > 20


@pytest.mark.parametrize("path", ["/records.jsonl", "/AAAAAAAAAAAAAAAAAAAAAA/records.jsonl"])
def test_requests_without_the_secret_address_read_nothing(client: httpx.Client, path: str) -> None:
    """Everybody who works on this machine can connect."""
    for answer in (client.get(client.base_url.join(path)), client.head(client.base_url.join(path))):
        assert answer.status_code == 404
        assert b"orders" not in answer.content
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as raw:
        raw.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        assert raw.recv(64).startswith(b"HTTP/1.0 404 ")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "x@localhost.", ""])
def test_other_names_are_refused(client: httpx.Client, host: str) -> None:
    for path in ("", "records.jsonl"):
        answer = client.get(path, headers={"Host": host})
        assert (answer.status_code, answer.text) == (421, "ask for 127.0.0.1 or localhost\n")


@pytest.mark.slow
def test_callers_are_bounded_and_make_room_again(run: Path) -> None:
    with served(run) as url:
        where = urlsplit(url)
        silent = [
            socket.create_connection((where.hostname, where.port), timeout=60) for _ in range(MAX_CALLERS)
        ]
        for one in silent:
            one.sendall(b"GET / HT")
        extra = socket.create_connection((where.hostname, where.port), timeout=60)
        assert extra.recv(1) == b""  # closed without an answer
        for one in (*silent, extra):
            one.close()
        with httpx.Client(transport=httpx.HTTPTransport(retries=0), trust_env=False) as asking:
            for _ in range(50):
                try:
                    assert asking.get(url).status_code == 200
                    break
                except httpx.RemoteProtocolError:
                    continue
            else:
                pytest.fail("expected room after the silent ones had gone")


def test_ctrl_c_while_a_connection_is_accepted_is_not_lost(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = server.PageServer(run)
    let_in = ThreadingHTTPServer.process_request

    def interrupted(self: ThreadingHTTPServer, request: socket.socket, address: Any) -> None:
        let_in(self, request, address)
        while page._slots._value < MAX_CALLERS:  # the thread has come to its end, and has made room
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "process_request", interrupted)
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(KeyboardInterrupt):
        page.process_request(ours, ("127.0.0.1", 1))
    ours.close()
    page.server_close()
