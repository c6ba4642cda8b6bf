"""Fleets of environment servers on Kubernetes: the pods of a StatefulSet, each with its own name."""

import base64
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self

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


class ClusterFleet(ServerFleet):
    """A fleet of a Kubernetes cluster, whose objects of one kind, its own, have its name as a label.

    Unless `detached`, the objects end with this program: with its pod, by the cluster's garbage collection, or else, if
    the program was killed, when the next fleet is started from the same machine.

    Args:
        servers: Number of servers.
        name: Name of the fleet; by default a random one.
        token: Bearer token of the servers; by default a random one.
        namespace: The namespace.
        detached: Whether the fleet outlives this program.
    """

    KIND: ClassVar[Mapping[str, str]]
    """Group, version and plural of the objects, by which the API knows them."""

    def __init__(
        self, servers: int, name: str | None, token: str | None, namespace: str, *, detached: bool
    ) -> None:
        super().__init__(servers, name, token)
        self._namespace, self._detached = namespace, detached
        self._core: Any = kubernetes.client.CoreV1Api()  # its stubs take every field for optional
        self._custom = custom_objects()

    def _cordon(self, server: FleetServer) -> None:
        """Do nothing: no process of ours can signal a server there."""

    def _uncordon(self, server: FleetServer) -> None:
        """Do nothing, since `_cordon` did nothing."""

    def _create(
        self, name: str, kind: str, spec: Mapping[str, Any], annotations: Mapping[str, str]
    ) -> dict[str, Any]:
        """Create an object, and sweep first those that programs of this machine have left; return it."""
        for each in list_objects(self.KIND, self._namespace, MANAGER):
            process = parse(each["metadata"].get("annotations", {}).get(OWNER, ""))
            if process is not None and is_gone(process):
                self._delete(each["metadata"]["name"])
        metadata = {"name": name, "labels": {**NAME, **MANAGER, INSTANCE: self.name}}
        with translated_errors():
            if not self._detached and "KUBERNETES_SERVICE_HOST" in os.environ:
                pod = self._core.read_namespaced_pod(socket.gethostname(), self._namespace).metadata
                metadata |= _owned_by("v1", "Pod", pod.name, pod.uid)
            elif not self._detached:
                annotations = {**annotations, OWNER: str(owner())}
            version = f"{self.KIND['group']}/{self.KIND['version']}"
            metadata["annotations"] = annotations
            body = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
            created: dict[str, Any] = self._custom.create_namespaced_custom_object(
                namespace=self._namespace, body=body, **self.KIND
            )
        return created

    def _delete(self, name: str) -> None:
        """Delete an object, and with it what it owns, if it is there."""
        delete = partial(self._custom.delete_namespaced_custom_object, propagation_policy="Background")
        call_unless_missing(lambda: delete(namespace=self._namespace, name=name, **self.KIND))


class KubernetesFleet(ClusterFleet):
    """A fleet in a StatefulSet, with a headless Service and a Secret. Needs the extra `kubernetes`.

    The servers' URLs are names inside the cluster, so clients have to run there. The cluster restarts pods that die. A
    pod that is to leave refuses new sessions and waits for the open ones, before its server is stopped, by a hook.

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

    KIND = MappingProxyType({"group": "apps", "version": "v1", "plural": "statefulsets"})

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
        namespace = namespace or namespace_of_configuration()
        super().__init__(servers, name, token, namespace, detached=detached)
        self._image, self._env_vars = image, dict(env_vars or {})
        self._resources = {"cpu": str(cpus), "memory": memory}
        self._session_grace_s = session_grace_s

    @classmethod
    def find(cls, name: str, namespace: str | None = None) -> Self:
        """Return a running fleet, or release of the chart."""
        namespace = namespace or namespace_of_configuration()
        with translated_errors():
            found = custom_objects().get_namespaced_custom_object(namespace=namespace, name=name, **cls.KIND)
        return cls(
            found["spec"]["template"]["spec"]["containers"][0]["image"],
            found["spec"]["replicas"] or 1,
            name=name,
            token=read_token(namespace, name),
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
        self._delete(self.name)

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
        patch = partial(self._custom.patch_namespaced_custom_object_scale, namespace=self._namespace)
        size = {"spec": {"replicas": servers}}
        if call_unless_missing(lambda: patch(name=self.name, body=size, **self.KIND)) is not None:
            return
        created = self._create(self.name, "StatefulSet", self._describe_stateful_set(servers), {})
        metadata = {"name": self.name, "labels": created["metadata"]["labels"]}
        metadata |= _owned_by("apps/v1", "StatefulSet", self.name, created["metadata"]["uid"])
        about = {"apiVersion": "v1", "metadata": metadata}
        ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
        spec = {"clusterIP": "None", "selector": {**NAME, INSTANCE: self.name}, "ports": ports}
        with translated_errors():
            secret = {**about, "kind": "Secret", "stringData": {"token": self.token}}
            self._core.create_namespaced_secret(self._namespace, secret)
            self._core.create_namespaced_service(self._namespace, {**about, "kind": "Service", "spec": spec})

    def _is_idle(self, server: FleetServer) -> bool:
        """Return True: the hook that runs before the pod ends waits for its sessions."""
        return True

    def _describe_stateful_set(self, servers: int) -> dict[str, Any]:
        """Return the specification of the StatefulSet, whose pods are those of `dockerfiles/chart`, which says why."""
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
            "serviceName": self.name,
            "replicas": servers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }


def _owned_by(version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    """Return metadata of what the cluster deletes with another object."""
    return {"ownerReferences": [{"apiVersion": version, "kind": kind, "name": name, "uid": uid}]}


def custom_objects() -> Any:
    """Return the interface to objects of any group, as dictionaries."""
    return kubernetes.client.CustomObjectsApi()


def list_objects(kind: Mapping[str, str], namespace: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the objects of a kind that have all these labels."""
    selector = ",".join(f"{key}={label}" for key, label in labels.items())
    with translated_errors():
        found = custom_objects().list_namespaced_custom_object(
            namespace=namespace, label_selector=selector, **kind
        )
    items: list[dict[str, Any]] = found["items"]
    return items


def read_token(namespace: str, secret: str) -> str:
    """Return the token in a Secret."""
    core: Any = kubernetes.client.CoreV1Api()
    with translated_errors():
        return base64.b64decode(core.read_namespaced_secret(secret, namespace).data["token"]).decode()


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
