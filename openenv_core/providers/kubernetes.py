"""Fleets of environment servers on Kubernetes: the pods of a StatefulSet, each with its own name."""

import base64
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from openenv_core.errors import ProviderError, installed_with
from openenv_core.providers.docker.sweeper import is_gone, owner, parse
from openenv_core.providers.fleet import READY_TIMEOUT_S, FleetServer, ServerFleet

with installed_with("kubernetes", "Kubernetes' client", "kubernetes"):
    import kubernetes
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

NAME: Final = {"app.kubernetes.io/name": "ropewalk-environment"}
MANAGER: Final = {"app.kubernetes.io/managed-by": "ropewalk"}
INSTANCE: Final = "app.kubernetes.io/instance"

OWNER: Final = "ropewalk/owner"
"""Annotation with the process that a fleet ends with, if that does not run in a pod."""

PORT: Final = 8000
DRAIN_TIMEOUT_S: Final = 20
"""Seconds that the pod of a replaced server has to end."""

POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

WAIT_FOR_SESSIONS: Final = """\
import json, os, signal, time
from urllib.request import Request, urlopen
os.kill(1, signal.SIGUSR1)
token = open("/etc/ropewalk/token").readline().strip()
request = Request("http://127.0.0.1:8000/capacity", headers={"Authorization": f"Bearer {token}"})
while json.load(urlopen(request, timeout=60))["in_use"]:
    time.sleep(1)
"""
"""Runs before a pod's server is stopped: it refuses new sessions, and the open ones end."""


class KubernetesFleet(ServerFleet):
    """A fleet in a StatefulSet, with a headless Service and a Secret. Needs the extra `kubernetes`.

    The servers' URLs are names inside the cluster, so clients have to run there. The cluster restarts pods that die. A
    pod that is to leave refuses new sessions and waits for the open ones, before its server is stopped. Unless
    `detached`, the fleet ends with this program: with its pod, by the cluster's garbage collection, or else, if the
    program was killed, when the next fleet is started from the same machine.

    It is configured as kubectl is, or by the pod's service account, which has to be allowed to change StatefulSets,
    Services, Secrets and pods of the namespace. `dockerfiles/chart` installs the same servers by Helm, and `find` finds
    them: the release's name is the fleet's.

    Args:
        image: The image.
        servers: Number of pods.
        name: Name of the fleet; by default a random one.
        token: Bearer token of the servers; by default a random one.
        namespace: The namespace; by default the configuration's, or the pod's own.
        env_vars: Environment variables of the servers.
        cpus: CPUs of each pod.
        memory: Memory of each pod, as Kubernetes writes it.
        session_grace_s: Seconds that a pod, before it ends by the cluster's will, waits for its sessions.
        detached: Whether the fleet outlives this program.

    Raises:
        ConfigurationError: An argument is invalid, or the client is not installed.
        ProviderError: The client is not configured.
    """

    def __init__(
        self,
        image: str,
        servers: int,
        *,
        name: str | None = None,
        token: str | None = None,
        namespace: str | None = None,
        env_vars: Mapping[str, str] | None = None,
        cpus: float = 1.0,
        memory: str = "512Mi",
        session_grace_s: int = 3600,
        detached: bool = False,
    ) -> None:
        super().__init__(servers, name, token)
        self._namespace = namespace or namespace_of_configuration()
        self._image, self._env_vars = image, dict(env_vars or {})
        self._resources = {"cpu": str(cpus), "memory": memory}
        self._session_grace_s, self._detached = session_grace_s, detached
        self._apps, self._core = _apis()

    @classmethod
    def find(cls, name: str, namespace: str | None = None) -> Self:
        """Return a running fleet, or release of the chart."""
        namespace = namespace or namespace_of_configuration()
        with translated_errors():
            apps, core = _apis()
            found = apps.read_namespaced_stateful_set(name, namespace)
            secret = core.read_namespaced_secret(name, namespace)
        token = base64.b64decode(secret.data["token"]).decode()
        (container,) = found.spec.template.spec.containers
        return cls(
            container.image,
            found.spec.replicas or 1,
            name=name,
            token=token,
            namespace=namespace,
            detached=True,
        )._adopt()

    def servers(self) -> list[FleetServer]:
        """Return the servers; one whose pod is not Ready, or is ending, is not."""
        selector = f"{INSTANCE}={self.name}"
        with translated_errors():
            pods = self._core.list_namespaced_pod(self._namespace, label_selector=selector).items
        found = []
        for pod in pods:
            name, conditions = pod.metadata.name, pod.status.conditions or ()
            ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
            url = f"http://{name}.{self.name}.{self._namespace}.svc:{PORT}"
            found.append(FleetServer(name, url, ready and pod.metadata.deletion_timestamp is None))
        return sorted(found, key=lambda server: server.number)

    def _end(self) -> None:
        """Delete the StatefulSet, and with it what it owns."""
        delete = self._apps.delete_namespaced_stateful_set
        call_unless_missing(lambda: delete(self.name, self._namespace, propagation_policy="Background"))

    def replace(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """End a pod, whose server drains, and wait for the next one of its name."""
        self._find(name)
        with translated_errors():
            before = self._core.read_namespaced_pod(name, self._namespace).metadata.uid
            self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=DRAIN_TIMEOUT_S)

        def is_replaced() -> bool:
            pod = call_unless_missing(lambda: self._core.read_namespaced_pod(name, self._namespace))
            ready = any(server.ready for server in self.servers() if server.name == name)
            return ready and pod is not None and pod.metadata.uid != before

        self._wait(is_replaced, timeout_s, f"{name} to be ready again; see kubectl describe pod {name}")

    def _resize(self, servers: int) -> None:
        patch = {"spec": {"replicas": servers}}
        scale = self._apps.patch_namespaced_stateful_set_scale
        if call_unless_missing(lambda: scale(self.name, self._namespace, patch)) is not None:
            return
        self._sweep()
        with translated_errors():
            labels = {**NAME, **MANAGER, INSTANCE: self.name}
            metadata: dict[str, Any] = {"name": self.name, "labels": labels}
            owned = {} if self._detached else describe_owner(self._core, self._namespace)
            body = self._describe_stateful_set({**metadata, **owned}, servers)
            created = self._apps.create_namespaced_stateful_set(self._namespace, body)
            metadata["ownerReferences"] = [
                {
                    "apiVersion": "apps/v1",
                    "kind": "StatefulSet",
                    "name": self.name,
                    "uid": created.metadata.uid,
                }
            ]
            about = {"apiVersion": "v1", "metadata": metadata}
            secret = {**about, "kind": "Secret", "stringData": {"token": self.token}}
            self._core.create_namespaced_secret(self._namespace, secret)
            ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
            spec = {"clusterIP": "None", "selector": {**NAME, INSTANCE: self.name}, "ports": ports}
            self._core.create_namespaced_service(self._namespace, {**about, "kind": "Service", "spec": spec})

    def _cordon(self, server: FleetServer) -> None:
        """Do nothing: the hook that runs before the pod ends does it."""

    def _uncordon(self, server: FleetServer) -> None:
        """Do nothing, since `_cordon` did nothing."""

    def _is_idle(self, server: FleetServer) -> bool:
        """Return True: the hook that runs before the pod ends waits for its sessions."""
        return True

    def _sweep(self) -> None:
        """Delete the fleets of programs of this machine that have ended without doing so."""
        selector = ",".join(f"{key}={value}" for key, value in MANAGER.items())
        with translated_errors():
            found = self._apps.list_namespaced_stateful_set(self._namespace, label_selector=selector).items
            for each in found:
                if is_orphan(each.metadata.annotations):
                    with suppress(ApiException):  # another program sweeps too
                        self._apps.delete_namespaced_stateful_set(
                            each.metadata.name, self._namespace, propagation_policy="Background"
                        )

    def _describe_stateful_set(self, metadata: Mapping[str, Any], servers: int) -> dict[str, Any]:
        """Return the StatefulSet, whose pods are those of `dockerfiles/chart`, which says why."""
        labels = {**NAME, INSTANCE: self.name}
        health = {"exec": {"command": ["healthcheck"]}, "timeoutSeconds": 5}
        env = {
            "ROPEWALK_TOKEN_FILE": "/etc/ropewalk/token",
            "ROPEWALK_ALLOWED_HOSTS": f"*.{self.name}.{self._namespace}.svc",
            **self._env_vars,
        }
        container = {
            "name": "server",
            "image": self._image,
            "ports": [{"name": "http", "containerPort": PORT}],
            "env": [{"name": name, "value": value} for name, value in env.items()],
            "resources": {"requests": self._resources, "limits": self._resources},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": 30},
            "readinessProbe": {**health, "periodSeconds": 10, "failureThreshold": 2},
            "livenessProbe": {**health, "periodSeconds": 20, "failureThreshold": 3},
            "lifecycle": {"preStop": {"exec": {"command": ["python", "-IS", "-c", WAIT_FOR_SESSIONS]}}},
            "volumeMounts": [
                {"name": "token", "mountPath": "/etc/ropewalk", "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }
        pod = {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": self._session_grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "runAsGroup": 10001,
                "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "token", "secret": {"secretName": self.name, "defaultMode": 0o440}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "128Mi"}},
            ],
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": metadata,
            "spec": {
                "serviceName": self.name,
                "replicas": servers,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }


def describe_owner(core: Any, namespace: str) -> dict[str, Any]:
    """Return metadata that ties an object to this program, or to its pod if it runs in one."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return {"annotations": {OWNER: str(owner())}}
    pod = core.read_namespaced_pod(socket.gethostname(), namespace).metadata
    return {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}]}


def is_orphan(annotations: Mapping[str, str] | None) -> bool:
    """Whether an object belongs to a program of this machine that has ended."""
    process = parse((annotations or {}).get(OWNER, ""))
    return process is not None and bool(is_gone(process))


def _apis() -> tuple[Any, Any]:
    """Return the interfaces of the cluster's API that are used; the stubs take every field for optional."""
    return kubernetes.client.AppsV1Api(), kubernetes.client.CoreV1Api()


def namespace_of_configuration() -> str:
    """Configure the client, and return the namespace to use."""
    config: Any = kubernetes.config
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config()
            return POD_NAMESPACE.read_text(encoding="utf-8").strip()
        config.load_kube_config()
        return str(config.list_kube_config_contexts()[1]["context"].get("namespace", "default"))
    except (kubernetes.config.ConfigException, OSError) as error:
        raise ProviderError(
            f"expected a configured Kubernetes client, got: {error}; see kubectl config"
        ) from error


def call_unless_missing(call: Callable[[], Any]) -> Any:
    """Return the result of a call; None if its object does not exist. Raises as `translated_errors`."""
    with translated_errors():
        try:
            return call()
        except ApiException as error:
            if error.status != 404:
                raise
            return None


@contextmanager
def translated_errors() -> Iterator[None]:
    """Convert the client's exceptions in the block to ProviderError."""
    try:
        yield
    except ApiException as error:
        raise ProviderError(
            f"expected the cluster to do it, got {error.status} {error.reason}: {error.body}"
        ) from error
    except (OSError, HTTPError) as error:
        raise ProviderError(
            f"expected the cluster's API to answer, got {type(error).__name__}: {error}"
        ) from error
