"""A stand-in for a cluster's API server: it lets one token in, and lists and watches pods as the real one does."""

import copy
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from local_http import QuietHandler

TOKEN = "of-the-service-account"
INDEX = "apps.kubernetes.io/pod-index"


def pod(
    name: str, template: Mapping[str, Any], *, index: int, ip: str, port: int, ready: bool
) -> dict[str, Any]:
    """A pod as the API shows it, made from a StatefulSet's template."""
    spec = copy.deepcopy(template["spec"])
    for entry in spec["containers"][0]["env"]:
        if entry["name"] == "MONARCH_PORT":
            entry["value"] = str(port)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**template["metadata"]["labels"], INDEX: str(index)}},
        "spec": spec,
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


class ApiServer:
    """Serves pods over TLS on loopback; `folder` gets the certificate and the token of a pod's service account.

    Attributes:
        asked: What was asked for: namespaces and label selectors.
    """

    def __init__(self, folder: Path, namespace: str) -> None:
        self.asked: list[tuple[str, str]] = []
        self._pods: dict[str, dict[str, Any]] = {}
        self._namespace = namespace
        self._lock = threading.Lock()
        (folder / "token").write_text(TOKEN)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_certificate(folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "ApiServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, shown: dict[str, Any]) -> None:
        """Add a pod, or change one."""
        with self._lock:
            self._pods[shown["metadata"]["name"]] = shown

    def _events(self, selector: str, seconds: float) -> Iterator[bytes]:
        wanted = dict(part.split("=") for part in selector.split(","))
        sent: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                shown = list(self._pods.values())
            for one in shown:
                name = one["metadata"]["name"]
                if wanted.items() <= one["metadata"]["labels"].items() and sent.get(name) is not one:
                    event = {"type": "MODIFIED" if name in sent else "ADDED", "object": one}
                    sent[name] = one
                    yield json.dumps(event).encode() + b"\n"
            time.sleep(0.05)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, words = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
                if self.headers.get("Authorization", "").lower() != f"bearer {TOKEN}":
                    self.send_error(401)
                elif (
                    path != f"/api/v1/namespaces/{server._namespace}/pods"
                    or words["watch"][0].lower() != "true"
                ):
                    self.send_error(404)
                else:
                    (selector,) = words["labelSelector"]
                    server.asked.append((server._namespace, selector))
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    # In chunks, as the real one: a client waits for the rest of anything else.
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    try:
                        for event in server._events(selector, float(words["timeoutSeconds"][0])):
                            self._chunk(event)
                        self._chunk(b"")
                    except OSError:
                        pass  # who asked has what they wanted

            def _chunk(self, content: bytes) -> None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
                self.wfile.flush()

        return Handler


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "ca.crt", folder / "ca.key"
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    named = ["-subj", "/CN=stand-in", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *words, *named, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
