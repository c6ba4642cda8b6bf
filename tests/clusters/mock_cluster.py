"""A mock of a cluster's API: it keeps objects, and makes the pods of StatefulSets and claims; nothing runs in them."""

import base64
import json
import threading
import uuid
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml
from local_http import QuietHandler

OLDEST = "1.29"


class MockCluster:
    """Serves on loopback, and validates what is created against the oldest version's schemas.

    Attributes:
        objects: By their path, such as `/api/v1/namespaces/default/pods/games-0`.
        unready: Names of pods and claims that are not Ready.
        pools: Names of warm pools, from which claims get a sandbox.
        lock: Held by whoever reads or changes these.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.unready: set[str] = set()
        self.pools = {"warm"}
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True

    def write_kubeconfig(self, file: Path, namespace: str) -> None:
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        context = {"cluster": "mock", "user": "mock", "namespace": namespace}
        settings = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "mock",
            "clusters": [{"name": "mock", "cluster": {"server": url}}],
            "users": [{"name": "mock", "user": {}}],
            "contexts": [{"name": "mock", "context": context}],
        }
        file.write_text(yaml.safe_dump(settings))

    def names(self, kind: str) -> list[str]:
        """Return the names of the objects of a kind, such as `pods`."""
        with self.lock:
            return sorted(path.rpartition("/")[2] for path in self.objects if f"/{kind}/" in path)

    def create(self, collection: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body["kind"] != "SandboxClaim":  # of which it has no schema
            kubernetes_validate.validate(body, OLDEST, strict=True)
        path = f"{collection}/{body['metadata']['name']}"
        if path in self.objects:
            return 409, {"message": "already exists"}
        for key, text in body.pop("stringData", {}).items():
            body.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
        body["metadata"]["uid"] = str(uuid.uuid4())
        self.objects[path] = body
        self._make_pods()
        return 201, body

    def get(self, path: str, selector: str) -> tuple[int, Any]:
        if path in self.objects:
            return 200, self._shown(path)
        if not path.endswith(("pods", "statefulsets", "sandboxclaims")):
            return 404, {"message": "not found"}
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        found = [
            self._shown(key)
            for key, each in self.objects.items()
            if key.rpartition("/")[0] == path and wanted.items() <= each["metadata"]["labels"].items()
        ]
        return 200, {"items": found}

    def scale(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if (found := self.objects.get(path.removesuffix("/scale"))) is None:
            return 404, {"message": "not found"}
        found["spec"]["replicas"] = body["spec"]["replicas"]
        self._make_pods()
        return 200, {"metadata": found["metadata"], "spec": body["spec"]}

    def delete(self, path: str) -> tuple[int, Any]:
        if (found := self.objects.pop(path, None)) is None:
            return 404, {"message": "not found"}
        uid = found["metadata"]["uid"]
        for key, each in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ())):
                self.delete(key)
        self._make_pods()
        return 200, {}

    def _make_pods(self) -> None:
        for path, each in list(self.objects.items()):
            if "/statefulsets/" not in path:
                continue
            namespace = path.split("/")[5]
            name, uid, spec = each["metadata"]["name"], each["metadata"]["uid"], each["spec"]
            owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": uid}
            pods = f"/api/v1/namespaces/{namespace}/pods"
            for number in range(spec["replicas"]):
                template = spec["template"]
                metadata = {**template["metadata"], "name": f"{name}-{number}", "ownerReferences": [owner]}
                if f"{pods}/{name}-{number}" not in self.objects:
                    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
                    self.create(pods, json.loads(json.dumps(pod)))
            for pod_name in self.names("pods"):
                prefix, _, number = pod_name.rpartition("-")
                if prefix == name and int(number) >= spec["replicas"]:
                    self.objects.pop(f"{pods}/{pod_name}", None)

    def _shown(self, path: str) -> dict[str, Any]:
        shown = dict(self.objects[path])
        if "/pods/" in path:
            ready = "False" if shown["metadata"]["name"] in self.unready else "True"
            shown["status"] = {"conditions": [{"type": "Ready", "status": ready}]}
        elif "/sandboxclaims/" in path:
            name, pool = shown["metadata"]["name"], shown["spec"]["warmPoolRef"]["name"]
            if pool not in self.pools:
                why = {"reason": "WarmPoolNotFound", "message": f"there is no pool {pool}"}
                shown["status"] = {"conditions": [{"type": "Ready", "status": "False", **why}]}
            elif name not in self.unready:
                address = f"10.1.0.{int(shown['metadata']['uid'][:2], 16)}"
                sandbox = {"name": f"{pool}-{shown['metadata']['uid'][:5]}", "podIPs": [address]}
                shown["status"] = {"conditions": [{"type": "Ready", "status": "True"}], "sandbox": sandbox}
        return shown

    def _handler(self) -> type[QuietHandler]:
        cluster = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                parts = urlsplit(self.path)
                body = json.loads(self.read_body() or b"null")
                with cluster.lock:
                    if self.command == "POST":
                        status, reply = cluster.create(parts.path, body)
                    elif self.command == "PATCH":
                        status, reply = cluster.scale(parts.path, body)
                    elif self.command == "DELETE":
                        status, reply = cluster.delete(parts.path)
                    else:
                        (selector,) = parse_qs(parts.query).get("labelSelector", [""])
                        status, reply = cluster.get(parts.path, selector)
                    content = json.dumps(reply).encode()
                self.reply(status, content, Content_Type="application/json")

            do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - the base class's names

        return Handler
