"""A fake Docker engine, whose containers are entries in a dictionary."""

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from local_http import QuietHandler, running


class FakeEngine:
    """The engine's containers, and the requests it received."""

    def __init__(self, path: Path) -> None:
        self.host = f"unix://{path}"
        self.containers: dict[str, dict[str, str]] = {}
        self.removed: list[str] = []
        self.request_received = threading.Event()
        self.may_create = threading.Event()
        self.may_create.set()

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        parts = urlsplit(re.sub(r"^/v[\d.]+", "", target))
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.path == "/version":
            return 200, {"ApiVersion": "1.41"}
        if (method, parts.path) == ("POST", "/containers/create"):
            self.request_received.set()
            self.may_create.wait(60)
            self.containers[query["name"]] = json.loads(body)["Labels"]
            return 201, {"Id": query["name"]}
        if (method, parts.path) == ("GET", "/containers/json"):
            wanted = [each.split("=", 1) for each in json.loads(query["filters"])["label"]]
            return 200, [
                {"Id": name, "Labels": labels, "State": "created", "Created": 0}
                for name, labels in list(self.containers.items())
                if all(labels.get(key) == value for key, value in (each for each in wanted if len(each) == 2))
            ]
        if (
            method == "DELETE"
            and self.containers.pop(name := parts.path.rpartition("/")[2], None) is not None
        ):
            self.removed.append(name)
            return 204, None
        return 404, {"message": "no such container"}


@contextmanager
def fake_engine(folder: Path) -> Iterator[FakeEngine]:
    fake = FakeEngine(folder / "engine.sock")

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            if "/containers/cut/" in self.path:  # a response that ends too early
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n" + bytes(512))
                self.close_connection = True
                return
            status, answer = fake.answer(self.command, self.path, self.read_body())
            self.reply(status, b"" if answer is None else json.dumps(answer).encode())

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815 - as http.server calls them

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # the client has disconnected

    with running(Server(str(folder / "engine.sock"), Handler)):
        try:
            yield fake
        finally:
            fake.may_create.set()
