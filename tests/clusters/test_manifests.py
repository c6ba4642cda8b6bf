"""The manifests by themselves: the API's schemas, and that what they say in two places is the same."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import FOLDER, OBJECTS, ROOT, container, may_reach, named, pod_templates, references, variables
from missing import missing

from rl_bridge.config import Config, load_config

OLDEST = "1.29"
"""StatefulSets label their pods with an index since 1.28, whose schema wants more of a failure policy than the API."""
PODS = sorted(pod_templates())
SECRETS = {"environment"}
"""What the second of the three commands makes."""


def schemas() -> Any:
    if importlib.util.find_spec("kubernetes_validate") is None:
        missing("needs kubernetes-validate, which ropewalk[dev] brings")
    import kubernetes_validate

    return kubernetes_validate


def trained() -> Config:
    """The configuration that the job's words make."""
    words = [word.replace("$(POD_IP)", "10.0.0.7") for word in container("train")["args"]]
    return load_config(ROOT / "examples/grpo_blackjack/config.yaml", words)


def replicas(name: str) -> int:
    count: int = named("StatefulSet", name)["spec"]["replicas"]
    return count


@pytest.mark.parametrize("version", [OLDEST, "latest"])
def test_they_are_what_the_api_takes(version: str) -> None:
    kubernetes_validate = schemas()
    against = kubernetes_validate.latest_version() if version == "latest" else version
    for one in OBJECTS:
        kubernetes_validate.validate(one, against, strict=True)


def test_the_schemas_find_what_is_wrong() -> None:
    kubernetes_validate = schemas()
    wrong = {**named("StatefulSet", "gpus"), "spec": {**named("StatefulSet", "gpus")["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_every_file_is_applied() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which needs no cluster for this")
def test_kubectl_builds_them() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", FOLDER], capture_output=True, text=True, check=True, timeout=60
    )
    objects = list(yaml.safe_load_all(built.stdout))
    assert len(objects) == len(OBJECTS)
    assert {one["metadata"].get("namespace") for one in objects if one["kind"] != "Namespace"} == {"ropewalk"}
    images = set(re.findall(r"image: (\S+)", built.stdout))
    assert images == {"ropewalk-rl:gpu", "blackjack-env:latest"}


@pytest.mark.parametrize("name", PODS)
def test_nodes_with_gpus_are_for_what_computes_on_them(name: str) -> None:
    pod = pod_templates()[name]["spec"]
    wants = any("nvidia.com/gpu" in one["resources"]["limits"] for one in pod["containers"])
    required = (
        pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    )
    if wants:
        assert required is None, "the device plugin finds the node"
    else:
        (term,) = required["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": "nvidia.com/gpu.present", "operator": "DoesNotExist"}]


def test_the_files_say_nothing_that_yaml_1_1_reads_otherwise() -> None:
    """kubectl and PyYAML agree on these; other readers may not, so that there is nothing for them to disagree on."""
    for path in FOLDER.glob("*.yaml"):
        assert not re.search(r":\s(yes|no|on|off)\s*$", path.read_text(), re.MULTILINE), path


def test_the_controller_waits_for_the_pods_that_there_are() -> None:
    said = variables("train")
    assert said["GPUS_PODS"] == str(replicas("gpus"))
    assert said["CPUS_PODS"] == str(replicas("cpus"))


@pytest.mark.parametrize("name", ["gpus", "cpus"])
def test_the_controller_finds_the_pods(name: str) -> None:
    """The selector that job.py asks with, read from its source: importing it takes Monarch."""
    source = (FOLDER / "job.py").read_text()
    assert 'f"app.kubernetes.io/name=ropewalk,app.kubernetes.io/component={component}"' in source
    labels = pod_templates()[name]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "ropewalk", "app.kubernetes.io/component": name}
    # Monarch reads the port from the pod's own variable.
    (port,) = container(name)["ports"]
    assert variables(name)["MONARCH_PORT"] == str(port["containerPort"])


def test_the_configuration_fits_the_cluster() -> None:
    config = trained()
    assert config.env is not None
    monarch = config.monarch
    assert config.env.url == tuple(
        f"http://environment-{index}.environment:8000" for index in range(replicas("environment"))
    )
    assert config.env.token_file == variables("environment")["ROPEWALK_TOKEN_FILE"]
    assert config.env.sessions <= replicas("environment") * int(
        variables("environment")["ROPEWALK_MAX_SESSIONS"] or 0
    )
    assert variables("environment")["ROPEWALK_ALLOWED_HOSTS"] == "*.environment"
    assert monarch.num_nodes == replicas("gpus")
    assert monarch.gpus_per_node == int(container("gpus")["resources"]["limits"]["nvidia.com/gpu"])
    assert monarch.roles.gpus() == monarch.num_nodes * monarch.gpus_per_node
    assert (monarch.job, monarch.cpu_mesh) == ("examples.grpo_blackjack.kubernetes.job:pods", "cpus")
    assert monarch.master_addr == "10.0.0.7"
    run = Path(str(variables("train")["RUN"]))
    assert str(run.parent) == config.output_dir


def test_the_run_is_where_every_pod_of_it_sees_it() -> None:
    for name in ("train", "gpus", "cpus"):
        mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
        assert mounts["runs"] == "/runs"
        # A library that writes beside itself would not find a place; these are for those that ask for one.
        assert {"/tmp", "/dev/shm"} < set(mounts.values())
    assert named("PersistentVolumeClaim", "runs")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_what_they_name_is_there() -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in OBJECTS} | {
        ("Secret", name) for name in SECRETS
    }
    asked = set(references(OBJECTS))
    assert asked <= there
    assert {kind for kind, _ in asked} == {"PersistentVolumeClaim", "Secret", "ServiceAccount", "Service"}


@pytest.mark.parametrize("name", PODS)
def test_no_pod_may_more_than_it_has_to(name: str) -> None:
    spec, one = pod_templates()[name]["spec"], container(name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # The controller alone speaks to the API server.
    assert spec["automountServiceAccountToken"] is (name == "train")
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_bounded_and_looked_after(name: str) -> None:
    one = container(name)
    assert one["resources"]["requests"] == one["resources"]["limits"]
    assert {"cpu", "memory", "ephemeral-storage"} <= set(one["resources"]["limits"])
    assert "startupProbe" in one
    assert "livenessProbe" in one
    # Nobody connects to the controller by a service.
    assert ("readinessProbe" in one) == (name != "train")
    for volume in pod_templates()[name]["spec"]["volumes"]:
        assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], volume


def test_the_controller_may_look_at_pods_and_no_more() -> None:
    assert named("Role", "train")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


@pytest.mark.parametrize("source", ["train", "gpus", "cpus"])
def test_the_processes_of_a_run_reach_each_other_and_the_environment(source: str) -> None:
    for target in ("train", "gpus", "cpus"):
        assert may_reach(source, target, 26600)
        assert may_reach(source, target, 45678)
    assert may_reach(source, "environment", 8000)
    assert not may_reach(source, "environment", 22)
    assert may_reach(source, None, 53, namespace="kube-system")
    # Not the world, and the API server only for who has to ask it.
    assert not may_reach(source, None, 80)
    assert may_reach(source, None, 443) is (source == "train")


def test_nobody_else_reaches_anything() -> None:
    for target in PODS:
        for port in (26600, 8000, 29501):
            assert not may_reach(None, target, port)
    for target in ("train", "gpus", "cpus", "environment"):
        assert not may_reach("environment", target, 26600)
        assert not may_reach("environment", target, 8000)
    assert not may_reach("environment", None, 443)
    assert not may_reach("environment", None, 53, namespace="kube-system")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs processes of its own: root"
)
def test_who_is_told_first_that_a_pod_goes() -> None:
    """The hook in processes of its own: what the run has started there is told, the worker is not."""
    shell, option, hook = container("cpus")["lifecycle"]["preStop"]["exec"]["command"]
    assert "sleep 12" in hook
    grace = pod_templates()["cpus"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 12
    script = f"""
        ROPEWALK_MARK=7 sleep 60 & started=$!
        sleep 60 & worker=$!
        {shell} {option} {shlex.quote(hook.replace("sleep 12", "sleep 0"))}
        wait $started; echo $?
        kill -0 $worker && echo works; kill $worker
    """
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == ["143", "works"]


def test_a_pod_that_no_policy_names_reaches_nothing() -> None:
    assert named("NetworkPolicy", "nothing")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


@pytest.mark.parametrize("left", [None, [], ["config.yaml"], ["logs"]])
def test_a_further_pod_goes_on_with_what_the_one_before_has_left(
    tmp_path: Path, left: list[str] | None
) -> None:
    (tmp_path / "ropewalk").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "ropewalk").chmod(0o755)
    run = tmp_path / "runs/blackjack"
    run.parent.mkdir()
    if left is not None:
        run.mkdir()
        for name in left:
            (run / name).touch()
    asked = subprocess.run(
        [*container("train")["command"], "a=b", "c=[d, e]"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(run)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    begun = ["--config", "examples/grpo_blackjack/config.yaml", "--name", "blackjack"]
    words = ["--resume", str(run)] if left == ["config.yaml"] else begun
    assert asked.stdout.split() == ["train", *words, "a=b", "c=[d,", "e]"]
    # What a run has written is nobody's to take away; a folder in which none began is one that the next may take.
    assert run.exists() == (left is not None)
