"""A fake of Together's Code Interpreter: its documented HTTP interface on a real socket, and failures on demand.

It has not been compared with the service. Each session runs code in an unprotected Python process: only use trusted
code.
"""

import base64
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from local_http import QuietHandler, running

TOKEN = "tgp_v1_a-token-of-the-fake"
WAIT_TIMEOUT_S = 60.0

RUNNER = """
import ast, contextlib, io, json, sys, traceback
names, out = {"__name__": "__main__"}, sys.stdout
for line in sys.stdin:
    outputs, wrote, erred = [], io.StringIO(), io.StringIO()
    def display(**bundle):
        outputs.append({"type": "display_data", "data": {k.replace("__", "/"): v for k, v in bundle.items()}})
    names["display"] = display
    keep = sys.stdin
    with contextlib.redirect_stdout(wrote), contextlib.redirect_stderr(erred):
        try:
            tree = ast.parse(json.loads(line))
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
                if value is not None:
                    outputs.append({"type": "execute_result", "data": {"text/plain": repr(value)}})
        except BaseException:
            outputs.append({"type": "error", "data": traceback.format_exc()})
    outputs[:0] = [{"type": t, "data": f.getvalue()} for t, f in (("stdout", wrote), ("stderr", erred)) if f.getvalue()]
    out.write(json.dumps(outputs) + "\\n")
    out.flush()
"""


class Session:
    """An interpreter in its own process and folder."""

    def __init__(self) -> None:
        self.id = f"ses_{secrets.token_hex(6)}"
        self.executions = 0
        self._folder = tempfile.TemporaryDirectory()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", RUNNER],
            cwd=self._folder.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, files: list[dict[str, str]]) -> list[dict[str, Any]]:
        with self._lock:
            for each in files:
                text = each["content"]
                data = base64.b64decode(text) if each["encoding"] == "base64" else text.encode()
                Path(self._folder.name, each["name"]).write_bytes(data)
            self.executions += 1
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps(code) + "\n")
            stdin.flush()
            outputs: list[dict[str, Any]] = json.loads(stdout.readline() or "[]")
            return outputs

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


@dataclass
class Fail:
    """A failure of one request.

    Attributes:
        status: Status of the answer, instead of the result's.
        headers: Headers of the answer.
        body: Body of the answer; with status 200 it replaces the result's.
        how: "answer"; "hang" reads the request without answering; "cut" closes the connection in the middle of the
            body; "close" closes it before the answer.
        after: Whether the code is run nevertheless.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": {"message": "told to fail"}}'
    how: str = "answer"
    after: bool = False


class FakeTogether:
    """The server.

    Attributes:
        fails: Failures of the next executions, in order.
        fails_of_sessions: Failures of the next listings of sessions.
        seen: Method, path and body of each request that had the token.
        hanging: Set once a request hangs.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.base_url = f"http://{address[0]}:{address[1]}/v1"
        self.fails: deque[Fail] = deque()
        self.fails_of_sessions: deque[Fail] = deque()
        self.seen: list[tuple[str, str, Any]] = []
        self.sessions: dict[str, Session] = {}
        self.hanging = threading.Event()
        self.over = threading.Event()

    @property
    def codes(self) -> list[str]:
        """The code of each requested execution."""
        return [body["code"] for method, _, body in self.seen if method == "POST"]

    def execute(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if body.get("language") != "python" or not isinstance(body.get("code"), str):
            return {"data": None, "errors": ["expected language and code"]}
        session_id = body.get("session_id")
        if session_id is None:
            session = Session()
            self.sessions[session.id] = session
        elif session_id in self.sessions:
            session = self.sessions[session_id]
        else:
            return {"data": None, "errors": [{"message": "session not found", "session_id": session_id}]}
        outputs = session.run(body["code"], body.get("files") or [])
        data = {"outputs": outputs, "session_id": session.id, "status": "success"}
        return {"data": data, "errors": None}

    def listed(self) -> Mapping[str, Any]:
        rows = [
            {
                "id": session.id,
                "execute_count": session.executions,
                "expires_at": "2030-01-01T00:00:00Z",
                "last_execute_at": "2029-12-31T23:00:00Z",
                "started_at": "2029-12-31T23:00:00Z",
            }
            for session in self.sessions.values()
        ]
        return {"errors": [], "data": {"sessions": rows}}

    def expire(self) -> None:
        """End all sessions, like the service when they expire."""
        while self.sessions:
            self.sessions.popitem()[1].close()


def _handler(fake: FakeTogether) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.read_body())
            if self._let_in("POST", "/v1/tci/execute", body):
                self._answer(fake.fails, lambda: fake.execute(body))

        def do_GET(self) -> None:
            if self._let_in("GET", "/v1/tci/sessions", None):
                self._answer(fake.fails_of_sessions, fake.listed)

        def _let_in(self, method: str, path: str, body: Any) -> bool:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                message = f"invalid key {self.headers.get('Authorization')}"  # a service may be careless
                self._send(Fail(401, body=json.dumps({"error": message}).encode()))
                return False
            if self.path != path:
                self._send(Fail(404))
                return False
            fake.seen.append((method, self.path, body))
            return True

        def _answer(self, fails: "deque[Fail]", result: Any) -> None:
            fail = fails.popleft() if fails else None
            if fail is None:
                self._send(Fail(body=json.dumps(result()).encode()))
                return
            if fail.after:
                result()
            if fail.how == "hang":
                fake.hanging.set()
                fake.over.wait(WAIT_TIMEOUT_S)
            if fail.how in ("hang", "close"):
                self._cut()
                return
            self._send(fail, cut=fail.how == "cut")

        def _send(self, fail: Fail, *, cut: bool = False) -> None:
            with suppress(OSError):  # the client may have disconnected
                self.send_response(fail.status)
                for name, value in fail.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(fail.body)))
                self.end_headers()
                self.wfile.write(fail.body[: len(fail.body) // 2] if cut else fail.body)
                if cut:
                    self._cut()

        def _cut(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect early, which some tests do."""


@contextmanager
def fake_together() -> Iterator[FakeTogether]:
    """Serve the fake on a free port of the loopback interface."""
    server = _Server(("127.0.0.1", 0), BaseHTTPRequestHandler)
    host, port = server.server_address[:2]
    fake = FakeTogether((str(host), int(port)))
    server.RequestHandlerClass = _handler(fake)
    with running(server):
        try:
            yield fake
        finally:
            fake.over.set()
            fake.expire()
