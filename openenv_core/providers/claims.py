"""Fleets of environment servers in sandboxes of agent-sandbox, which a Kubernetes cluster keeps warm in a pool."""

from types import MappingProxyType
from typing import Any, Final, Self

from openenv_core.errors import ProviderError
from openenv_core.providers.fleet import READY_TIMEOUT_S, FleetServer
from openenv_core.providers.kubernetes import (
    INSTANCE,
    PORT,
    ClusterFleet,
    list_objects,
    namespace_of_configuration,
    read_token,
)

SECRET: Final = "ropewalk/secret"
"""Annotation with the Secret that has the servers' token."""

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


class ClaimFleet(ClusterFleet):
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

    KIND = MappingProxyType(
        {"group": "extensions.agents.x-k8s.io", "version": "v1beta1", "plural": "sandboxclaims"}
    )

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
        namespace = namespace or namespace_of_configuration()
        super().__init__(servers, name, read_token(namespace, secret), namespace, detached=detached)
        self._pool, self._secret = pool, secret

    @classmethod
    def find(cls, name: str, namespace: str | None = None) -> Self:
        """Return a running fleet."""
        namespace = namespace or namespace_of_configuration()
        if not (found := list_objects(cls.KIND, namespace, {INSTANCE: name})):
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
                host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
                url = f"http://{host}:{PORT}"
            found.append(FleetServer(metadata["name"], url, ready))
        return sorted(found, key=lambda server: server.number)

    def replace(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Give a sandbox back, whose server drains, and claim another, which has another URL."""
        self._delete(self._find(name).name)
        self._wait(
            lambda: all(server.name != name for server in self.servers()), timeout_s, f"{name} to be released"
        )
        self._claim(name)
        self._wait(lambda: self._find(name).ready, timeout_s, f"{name} to be ready")

    def _end(self) -> None:
        for claim in self._list():
            self._delete(claim["metadata"]["name"])

    def _resize(self, servers: int) -> None:
        known = {claim["metadata"]["name"] for claim in self._list()}
        for name in known:
            if int(name.rpartition("-")[2]) >= servers:
                self._delete(name)
        for number in range(servers):
            if (name := f"{self.name}-{number}") not in known:
                self._claim(name)

    def _list(self) -> list[dict[str, Any]]:
        return list_objects(self.KIND, self._namespace, {INSTANCE: self.name})

    def _claim(self, name: str) -> None:
        spec = {"warmPoolRef": {"name": self._pool}}
        self._create(name, "SandboxClaim", spec, {SECRET: self._secret})
