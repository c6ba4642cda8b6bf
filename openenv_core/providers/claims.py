"""Fleets of environment servers in sandboxes of agent-sandbox, which a Kubernetes cluster keeps warm in a pool."""

import base64
from typing import Any, Final, Self

from openenv_core.errors import ProviderError, installed_with
from openenv_core.providers.fleet import READY_TIMEOUT_S, FleetServer, ServerFleet
from openenv_core.providers.kubernetes import (
    INSTANCE,
    MANAGER,
    NAME,
    PORT,
    call_unless_missing,
    describe_owner,
    is_orphan,
    namespace_of_configuration,
    translated_errors,
)

with installed_with("kubernetes", "Kubernetes' client", "kubernetes"):
    import kubernetes

SECRET: Final = "ropewalk/secret"
"""Annotation with the Secret that has the servers' token."""

CLAIMS: Final = {"group": "extensions.agents.x-k8s.io", "version": "v1beta1", "plural": "sandboxclaims"}

FINAL_REASONS: Final = frozenset(
    {
        "EnvVarsInjectionRejected",
        "InvalidConfiguration",
        "InvalidMetadata",
        "TemplateNotFound",
        "VolumeClaimTemplatesError",
        "WarmPoolNotFound",
    }
)
"""Why a claim is not ready, and will not be: reasons of agent-sandbox's controller."""


class ClaimFleet(ServerFleet):
    """A fleet of claims on a SandboxWarmPool. Needs the extra `kubernetes`, and agent-sandbox v1beta1 in the cluster.

    A claim gets a pod of the pool, which is ready already, so that a server is there in seconds. The pool's template
    says what a pod runs: one of our images at port 8000, with the token of a Secret. The servers' URLs are addresses of
    pods, so clients have to run in the cluster. The fleet ends with this program as a `KubernetesFleet` does, and is
    configured likewise.

    Args:
        pool: The SandboxWarmPool.
        servers: Number of claims.
        secret: The Secret whose key `token` is the servers' token.
        name: Name of the fleet; by default a random one.
        namespace: The namespace; by default the configuration's, or the pod's own.
        detached: Whether the fleet outlives this program.

    Raises:
        ConfigurationError: An argument is invalid, or the client is not installed.
        ProviderError: The client is not configured, or there is no such Secret.
    """

    def __init__(
        self,
        pool: str,
        servers: int,
        *,
        secret: str,
        name: str | None = None,
        namespace: str | None = None,
        detached: bool = False,
    ) -> None:
        self._namespace = namespace or namespace_of_configuration()
        self._core, self._custom = kubernetes.client.CoreV1Api(), _claims_api()
        with translated_errors():
            data = self._core.read_namespaced_secret(secret, self._namespace).data
        super().__init__(servers, name, base64.b64decode((data or {})["token"]).decode())
        self._pool, self._secret, self._detached = pool, secret, detached

    @classmethod
    def find(cls, name: str, namespace: str | None = None) -> Self:
        """Return a running fleet."""
        namespace = namespace or namespace_of_configuration()
        if not (found := _list(_claims_api(), namespace, {INSTANCE: name})):
            raise ProviderError(f"expected claims of a fleet {name!r} in {namespace}, got none")
        secret, pool = found[0]["metadata"]["annotations"][SECRET], found[0]["spec"]["warmPoolRef"]["name"]
        return cls(pool, len(found), secret=secret, name=name, namespace=namespace, detached=True)._adopt()

    def servers(self) -> list[FleetServer]:
        """Return the servers; one whose claim has no ready sandbox, or is ending, is not.

        Raises:
            ProviderError: The cluster does not answer, or refuses a claim for good.
        """
        found = []
        for claim in self._list():
            metadata, status = claim["metadata"], claim.get("status") or {}
            (condition,) = [each for each in status.get("conditions", ()) if each["type"] == "Ready"] or [{}]
            if condition.get("reason") in FINAL_REASONS:
                raise ProviderError(
                    f"expected a sandbox of the pool {self._pool}, got {condition['reason']}: {condition['message']}"
                )
            addresses = (status.get("sandbox") or {}).get("podIPs")
            ready = condition.get("status") == "True" and "deletionTimestamp" not in metadata
            url = None
            if addresses:
                url = (
                    f"http://[{addresses[0]}]:{PORT}"
                    if ":" in addresses[0]
                    else f"http://{addresses[0]}:{PORT}"
                )
            found.append(FleetServer(metadata["name"], url, ready))
        return sorted(found, key=lambda server: server.number)

    def replace(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Give a sandbox back, whose server drains, and claim another, which has another URL."""
        self._delete(self._find(name).name)
        self._wait(
            lambda: all(server.name != name for server in self.servers()), timeout_s, f"{name} to be released"
        )
        self._create(name)
        self._wait(lambda: self._find(name).ready, timeout_s, f"{name} to be ready")

    def _end(self) -> None:
        for claim in self._list():
            self._delete(claim["metadata"]["name"])

    def _resize(self, servers: int) -> None:
        known = {claim["metadata"]["name"] for claim in self._list()}
        for name in known:
            if int(name.rpartition("-")[2]) >= servers:
                self._delete(name)
        if not known:
            self._sweep()
        for number in range(servers):
            if (name := f"{self.name}-{number}") not in known:
                self._create(name)

    def _cordon(self, server: FleetServer) -> None:
        """Do nothing: no process of ours can signal a server there. It leaves once it happens to be idle."""

    def _uncordon(self, server: FleetServer) -> None:
        """Do nothing, since `_cordon` did nothing."""

    def _create(self, name: str) -> None:
        owned: dict[str, Any] = {} if self._detached else describe_owner(self._core, self._namespace)
        annotations = {**owned.pop("annotations", {}), SECRET: self._secret}
        labels = {**NAME, **MANAGER, INSTANCE: self.name}
        body = {
            "apiVersion": f"{CLAIMS['group']}/{CLAIMS['version']}",
            "kind": "SandboxClaim",
            "metadata": {"name": name, "labels": labels, "annotations": annotations, **owned},
            "spec": {"warmPoolRef": {"name": self._pool}},
        }
        with translated_errors():
            self._custom.create_namespaced_custom_object(namespace=self._namespace, body=body, **CLAIMS)

    def _delete(self, name: str) -> None:
        delete = self._custom.delete_namespaced_custom_object
        call_unless_missing(lambda: delete(namespace=self._namespace, name=name, **CLAIMS))

    def _list(self) -> list[dict[str, Any]]:
        return _list(self._custom, self._namespace, {INSTANCE: self.name})

    def _sweep(self) -> None:
        """Delete the claims of programs of this machine that have ended without doing so."""
        for claim in _list(self._custom, self._namespace, MANAGER):
            if is_orphan(claim["metadata"].get("annotations")):
                self._delete(claim["metadata"]["name"])


def _claims_api() -> Any:
    return kubernetes.client.CustomObjectsApi()


def _list(api: Any, namespace: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    selector = ",".join(f"{key}={label}" for key, label in labels.items())
    with translated_errors():
        found = api.list_namespaced_custom_object(namespace=namespace, label_selector=selector, **CLAIMS)
    items: list[dict[str, Any]] = found["items"]
    return items
