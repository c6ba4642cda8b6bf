"""The hosts of the run: existing pods, found by their labels. No operator is needed."""

import os

from monarch.job.kubernetes import KubernetesJob

from rl_bridge.errors import ConfigError

PODS_S = 1800
"""Time limit for pods to become ready, pulling of images included."""


def pods() -> KubernetesJob:
    """Return the job for `monarch.job`, with a mesh `hosts` of the pods of gpus.yaml.

    The environment variables NAMESPACE and GPUS_PODS, set by train.yaml, give their namespace and number.

    Raises:
        ConfigError: A variable is missing or invalid.
    """
    job = KubernetesJob(namespace=_read_variable("NAMESPACE"), timeout=PODS_S)
    job.add_mesh(
        "hosts",
        num_replicas=_read_count("GPUS_PODS"),
        label_selector="app.kubernetes.io/name=ropewalk,app.kubernetes.io/component=gpus",
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
