"""A server that answers every request, as an origin and as a proxy, and records the request targets."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "socks_proxy")


@contextmanager
def recording_proxy(answer: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield its port and the request targets: a path if it was used as the origin, a URL if as a proxy."""
    request_targets: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request_targets.append(self.path)
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any, **kwargs: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, request_targets
        finally:
            server.shutdown()
            thread.join()


def proxy_everything(monkeypatch: pytest.MonkeyPatch, port: int, *variables: str) -> None:
    """Configure the server as the proxy in these environment variables only."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in variables:
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
