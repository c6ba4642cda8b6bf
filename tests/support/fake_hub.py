"""A fake of the Hugging Face hub that answers and records an upload's requests."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from local_http import QuietHandler, running


@dataclass
class FakeHub:
    """The fake's files, and the requests it received."""

    url: str = ""
    token: str = "hf_of_the_fake"
    refuses: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        held = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    with running(server):
        yield hub


class _Handler(QuietHandler, BaseHTTPRequestHandler):
    held: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.read_body()
        hub, path = self.held, self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._answer(401, {"error": "Invalid username or password."})
        elif hub.refuses:
            self._answer(403, {"error": "You don't have the rights to create a space under this namespace"})
        elif path == "/api/repos/create":
            hub.created.append(json.loads(body))
            space = hub.created[-1]
            self._answer(200, {"url": f"{hub.url}/spaces/{space['organization']}/{space['name']}"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            self._answer(200, {"files": files})
        elif path.endswith("/commit/main"):
            self._commit(body)
        else:
            self._answer(404, {"error": f"the fake does not know POST {path}"})

    def do_GET(self) -> None:
        hub, path = self.held, self.path.partition("?")[0]
        if "/tree/main" in path:
            blank = "0" * 40
            files = [
                {"type": "file", "oid": blank, "size": len(data), "path": name}
                for name, data in hub.files.items()
            ]
            self._answer(200, files)
        elif "/revision/" in path or path.startswith("/api/spaces/"):
            self._answer(
                200, {"id": "me/dice", "sha": "0" * 40, "siblings": [{"rfilename": n} for n in hub.files]}
            )
        else:
            self._answer(404, {"error": f"the fake does not know GET {path}"})

    def _commit(self, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                self.held.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                self.held.files.pop(entry["value"]["path"], None)
        url = f"{self.held.url}/spaces/me/dice/commit/{'1' * 40}"
        self._answer(200, {"success": True, "commitOid": "1" * 40, "commitUrl": url})

    def _answer(self, status: int, content: Any) -> None:
        self.reply(status, json.dumps(content).encode(), Content_Type="application/json")
