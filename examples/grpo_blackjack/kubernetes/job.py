"""The hosts of the run: pods that are there already, found by their labels. No operator is needed."""

import os

from monarch.job.kubernetes import KubernetesJob

from rl_bridge.errors import ConfigError

PODS_S = 1800
"""How long pods may take to be ready, pulling their images included."""


def pods() -> KubernetesJob:
    """What `monarch.job` names: a mesh `hosts` of the pods with GPUs, and `cpus` of the others.

    train.yaml says how many there are of each, and where.

    Raises:
        ConfigError: It does not.
    """
    job = KubernetesJob(namespace=_read_variable("NAMESPACE"), timeout=PODS_S)
    for mesh, component in (("hosts", "gpus"), ("cpus", "cpus")):
        job.add_mesh(
            mesh,
            num_replicas=_read_count(f"{component.upper()}_PODS"),
            label_selector=f"app.kubernetes.io/name=ropewalk,app.kubernetes.io/component={component}",
        )
    return job


def _read_count(variable: str) -> int:
    text = _read_variable(variable)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"expected the variable {variable} as a number of pods, 1 or more, got {text!r}")
    return int(text)


def _read_variable(variable: str) -> str:
    try:
        return os.environ[variable]
    except KeyError:
        raise ConfigError(
            f"expected the variable {variable}, which train.yaml sets, it is not there"
        ) from None
