"""A server that answers every request, as an origin and as a proxy, and records the request targets."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from local_http import QuietHandler, running

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "socks_proxy")


@contextmanager
def recording_proxy(answer: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield its port and the request targets: a path if it was used as the origin, a URL if as a proxy."""
    request_targets: list[str] = []

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request_targets.append(self.path)
            self.reply(200, json.dumps(answer).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(server):
        yield server.server_port, request_targets


def proxy_everything(monkeypatch: pytest.MonkeyPatch, port: int, *variables: str) -> None:
    """Configure the server as the proxy in these environment variables only."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in variables:
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
