"""The page that a run's rollouts are read on, put together and served on this machine."""

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
"""In the order in which they stand on the page; each uses what comes before it."""
SERVED_RECORDS = "records.jsonl"
"""Where the page finds its records, where they do not stand in it."""

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def script() -> str:
    """All scripts as one."""
    return pages.script(__package__, SCRIPTS)


def policy(*, served: bool) -> str:
    """The content security policy: this script, this style, and nothing from anywhere, but the records of a server."""
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
    """The page of a run, for a server that has the records at `SERVED_RECORDS`."""
    return b"".join(_render(run, served=True, records=()))


def make_whole_page(run: Path, records: Iterable[bytes]) -> Iterator[bytes]:
    """The page of a run with its records in it, part by part."""
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
    for place, piece in enumerate(_PLACEHOLDER.split(pages.asset(__package__, "page.html"))):
        if place % 2 == 0:
            yield piece.encode()
        elif piece == "records":
            yield from map(_escape_markup, records)
        else:
            # A folder's name may be bytes that are no text.
            yield values[piece].encode(errors="replace")


def _escape_markup(line: bytes) -> bytes:
    r"""JSON that ends no element of HTML: `<` stands in strings alone, where `\u003c` means the same."""
    return line.replace(b"<", rb"\u003c")


HOST = "127.0.0.1"
HOST_NAMES = frozenset({HOST, "localhost"})
"""What a request may call this machine; on any port, since one may come here by way of another one's."""
MAX_CALLERS = 16
TIMEOUT_S = 30.0
"""How long a caller may take to ask, or to take a part of the answer."""


class PageServer(ThreadingHTTPServer):
    """The page and the records of one run, to whoever on this machine was told their address.

    Nothing can be changed by asking. Loopback is open to everybody who works on this machine, so the address has a part
    that cannot be guessed. A page of somebody else's that the same browser shows cannot read along either: the name
    that a request is for has to be this machine's own.
    """

    daemon_threads = True

    def __init__(self, run: Path, *, port: int = 0) -> None:
        self.run = run
        self.path = f"/{secrets.token_urlsafe(16)}/"
        """Where the page is; what it loads lies beside it."""
        self._slots = threading.BoundedSemaphore(MAX_CALLERS)
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}{self.path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, where one is free; otherwise not at all."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no Ctrl-C, which may come when the thread is there and gives the room back
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away, or does not take its answer, is no news; anything else is said."""
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
    """Changes when the records of a run do."""
    digest = hashlib.sha256()
    for path in list_segment_files(run):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns};".encode())
    return f'"{digest.hexdigest()[:32]}"'
