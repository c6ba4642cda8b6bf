"""Renders the page of a run's rollouts, and serves it on this machine."""

import contextlib
import hashlib
import html
import json
import re
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openenv_core import pages
from rl_bridge.records import list_segment_files, read_lines

SCRIPTS = (
    *("elements", "theme", "shortcuts", "records", "chat", "tokens", "turns", "heading", "filters", "links"),
    *("list", "found", "reading", "steps", "controls", "keys", "main"),
)
"""The page's scripts in their order; each uses those before it."""
SERVED_RECORDS = "records.jsonl"
"""The relative URL of the records, if they are not embedded in the page."""

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def script() -> str:
    """Return all scripts as one."""
    return pages.script(__package__, SCRIPTS)


def policy(*, served: bool) -> str:
    """Return the content security policy: only our script and style, and if `served` the server's records."""
    records = "'self'" if served else "'none'"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{pages.source_hash(script())}'",
            f"style-src '{pages.source_hash(pages.style(__package__))}'",
            "img-src data:",
            f"connect-src {records}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def make_served_page(run: Path) -> bytes:
    """Return the page of a run, for a server that has the records at `SERVED_RECORDS`."""
    return b"".join(_render(run, served=True, records=()))


def make_standalone_page(run: Path, records: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the page of a run with its records embedded, in parts."""
    return _render(run, served=False, records=records)


def _render(run: Path, *, served: bool, records: Iterable[bytes]) -> Iterator[bytes]:
    title = run.absolute().name
    settings = {"title": title, "served": SERVED_RECORDS if served else None}
    values = {
        "title": html.escape(title),
        "folder": html.escape(str(run.absolute())),
        "policy": html.escape(policy(served=served)),
        "style": pages.style(__package__),
        "script": script(),
        "settings": _escape_markup(json.dumps(settings).encode()).decode(),
    }
    for index, piece in enumerate(_PLACEHOLDER.split(pages.asset(__package__, "page.html"))):
        if index % 2 == 0:
            yield piece.encode()
        elif piece == "records":
            yield from map(_escape_markup, records)
        else:
            # A folder's name may contain bytes that are not valid UTF-8.
            yield values[piece].encode(errors="replace")


def _escape_markup(line: bytes) -> bytes:
    r"""Make JSON safe to embed in HTML: `<` occurs only in strings, where `\u003c` means the same."""
    return line.replace(b"<", rb"\u003c")


HOST = "127.0.0.1"
HOST_NAMES = frozenset({HOST, "localhost"})
"""Accepted names in a request's Host header; with any port, as requests may come through a forwarded one."""
MAX_CALLERS = 16
TIMEOUT_S = 30.0
"""How long a client may take to send its request, or to receive a part of the response."""


class PageServer(ThreadingHTTPServer):
    """Serves the page and the records of one run on loopback, read-only.

    Loopback is open to every user of this machine, so the path has a random part that cannot be guessed. The Host
    header has to name this machine, so that other sites in the same browser cannot read the records by DNS rebinding.
    """

    daemon_threads = True

    def __init__(self, run: Path, *, port: int = 0) -> None:
        self.run = run
        self.path = f"/{secrets.token_urlsafe(16)}/"
        """The page's path; what it loads is below it."""
        self._slots = threading.BoundedSemaphore(MAX_CALLERS)
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The page's URL."""
        return f"http://{HOST}:{self.server_port}{self.path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in a thread of its own, or close its connection if all slots are taken."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # not KeyboardInterrupt: by then the thread may run, and releases the slot itself
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request and release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or stop reading; log any other error."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        self._respond(body=True)

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def _respond(self, *, body: bool) -> None:
        path = self.path.encode(errors="replace")
        if not _is_this_machine(self.headers.get("Host", "")):
            self._send_refusal(
                HTTPStatus.MISDIRECTED_REQUEST, f"ask for {' or '.join(sorted(HOST_NAMES))}", body=body
            )
        elif secrets.compare_digest(path, self.server.path.encode()):
            page = make_served_page(self.server.run)
            headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(page))}
            self._send_head(HTTPStatus.OK, headers | {"Content-Security-Policy": policy(served=True)})
            if body:
                self.wfile.write(page)
        elif secrets.compare_digest(path, f"{self.server.path}{SERVED_RECORDS}".encode()):
            self._send_records(body=body)
        else:
            self._send_refusal(HTTPStatus.NOT_FOUND, "the page is at the address that was printed", body=body)

    def _send_records(self, *, body: bool) -> None:
        headers = {
            "Content-Type": "application/x-ndjson; charset=utf-8",
            "ETag": compute_etag(self.server.run),
        }
        lines = read_lines(self.server.run) if body else iter(())
        try:
            first = next(lines, b"")
        except OSError as error:
            reason = f"cannot read {str(error.filename)!r}: {error.strerror}"
            self._send_refusal(HTTPStatus.INTERNAL_SERVER_ERROR, reason, body=body)
            return
        self._send_head(HTTPStatus.OK, headers)
        self.wfile.write(first)
        for line in lines:
            self.wfile.write(line)

    def _send_refusal(self, status: HTTPStatus, reason: str, *, body: bool) -> None:
        self._send_head(status, {"Content-Type": "text/plain; charset=utf-8"})
        if body:
            self.wfile.write(f"{reason}\n".encode(errors="replace"))

    def _send_head(self, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        common = {
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Frame-Options": "DENY",
        }
        for name, value in (common | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class calls it that
        """Log no requests."""


def _is_this_machine(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in HOST_NAMES
    except ValueError:
        return False


def compute_etag(run: Path) -> str:
    """Return an ETag that changes when the records of a run do."""
    digest = hashlib.sha256()
    for path in list_segment_files(run):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns};".encode())
    return f'"{digest.hexdigest()[:32]}"'
