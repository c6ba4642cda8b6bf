"""The manifests of examples/grpo_blackjack/kubernetes, and which connections they allow."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/grpo_blackjack/kubernetes"

FILES: list[str] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
OBJECTS: list[dict[str, Any]] = [
    found for name in FILES for found in yaml.safe_load_all((FOLDER / name).read_text())
]


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod_templates() -> dict[str, dict[str, Any]]:
    """The pods that there will be, by the name of what makes them."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in OBJECTS
        if one["kind"] in {"StatefulSet", "Deployment", "Job"}
    }


def container(name: str) -> dict[str, Any]:
    (only,) = pod_templates()[name]["spec"]["containers"]
    return only


def variables(name: str) -> dict[str, str | None]:
    """A container's environment; None where the cluster fills it in."""
    return {entry["name"]: entry.get("value") for entry in container(name)["env"]}


def may_reach(source: str | None, target: str | None, port: int, *, namespace: str | None = None) -> bool:
    """Whether the network policies let a pod's connection through, by the rules of the NetworkPolicy API.

    Args:
        source: The pod's name among `pod_templates`; None for anyone outside.
        target: Likewise.
        port: TCP.
        namespace: Of a target that is outside; None for the rest of the world.
    """
    leaves = source is None or _allowed("egress", source, target, port, namespace)
    arrives = target is None or _allowed("ingress", target, source, port, None)
    return leaves and arrives


def _allowed(direction: str, pod: str, peer: str | None, port: int, namespace: str | None) -> bool:
    labels = pod_templates()[pod]["metadata"]["labels"]
    policies = [
        one["spec"]
        for one in OBJECTS
        if one["kind"] == "NetworkPolicy"
        and direction.capitalize() in one["spec"]["policyTypes"]
        and _matches(one["spec"]["podSelector"], labels)
    ]
    if not policies:
        return True
    return any(
        _lets_peer(rule, "to" if direction == "egress" else "from", peer, namespace)
        and _lets_port(rule, port)
        for policy in policies
        for rule in policy.get(direction, [])
    )


def _lets_peer(rule: Mapping[str, Any], key: str, peer: str | None, namespace: str | None) -> bool:
    return key not in rule or any(_is_peer(entry, peer, namespace) for entry in rule[key])


def _is_peer(entry: Mapping[str, Any], peer: str | None, namespace: str | None) -> bool:
    if peer is not None:
        return "podSelector" in entry and _matches(
            entry["podSelector"], pod_templates()[peer]["metadata"]["labels"]
        )
    return "namespaceSelector" in entry and _matches(
        entry["namespaceSelector"], {"kubernetes.io/metadata.name": str(namespace)}
    )


def _lets_port(rule: Mapping[str, Any], port: int) -> bool:
    return "ports" not in rule or any(
        entry["port"] == port and entry.get("protocol", "TCP") == "TCP" for entry in rule["ports"]
    )


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    for requirement in selector.get("matchExpressions", []):
        assert requirement["operator"] == "In", requirement
        if labels.get(requirement["key"]) not in requirement["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def references(node: Any) -> Iterator[tuple[str, str]]:
    """What else a manifest names: kinds and names."""
    kinds = {
        "claimName": "PersistentVolumeClaim",
        "secretName": "Secret",
        "serviceAccountName": "ServiceAccount",
        "serviceName": "Service",
    }
    if isinstance(node, dict):
        for key, value in node.items():
            if key in kinds:
                yield kinds[key], value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)
