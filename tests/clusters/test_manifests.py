"""The manifests and docs/clusters.md: valid by the API's schemas, and consistent with each other and the code."""

import argparse
import importlib.util
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from manifests import FILES, FOLDER, OBJECTS, container, find, may_reach, pod_templates, references, variables
from missing import missing
from module_run import ROOT, finished

from rl_bridge.cli.status import COMMAND as STATUS
from rl_bridge.config import Config, load_config
from rl_bridge.config.monarch import ReplicaRange
from rl_bridge.services.joining import RELEASE_TIMEOUT_S, SECRET_FILE
from tests.rl_bridge.config.sections import section_of

OLDEST = "1.29"
"""StatefulSets label their pods with an index since 1.28, whose schema wants more of a failure policy than the API."""
PODS = sorted(pod_templates())
JOINING = ("cpus", "generators")
RUN = ("train", "gpus", *JOINING)


def replicas(name: str) -> int:
    count: int = find("StatefulSet", name)["spec"]["replicas"]
    return count


@pytest.mark.parametrize("version", [OLDEST, "latest"])
def test_manifests_follow_the_schemas_of_the_api(version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        missing("needs kubernetes-validate, which ropewalk[dev] brings")
    import kubernetes_validate

    against = kubernetes_validate.latest_version() if version == "latest" else version
    for one in OBJECTS:
        kubernetes_validate.validate(one, against, strict=True)


def test_every_file_is_applied_and_says_nothing_that_readers_of_yaml_disagree_on() -> None:
    assert set(FILES) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    for path in FOLDER.glob("*.yaml"):
        assert not re.search(r":\s(yes|no|on|off)\s*$", path.read_text(), re.MULTILINE), path


def test_kubectl_builds_them() -> None:
    if shutil.which("kubectl") is None:
        missing("needs kubectl, which needs no cluster for this; see https://kubernetes.io/docs/tasks/tools/")
    built = finished("kubectl", "kustomize", FOLDER, timeout_s=60)
    objects = list(yaml.safe_load_all(built.stdout))
    assert len(objects) == len(OBJECTS)
    assert {one["metadata"].get("namespace") for one in objects if one["kind"] != "Namespace"} == {"ropewalk"}
    images = set(re.findall(r"image: (\S+)", built.stdout))
    assert images == {"ropewalk-rl:gpu", "blackjack-env:latest"}


def test_the_controller_finds_the_pods_and_waits_for_as_many_as_there_are() -> None:
    # The selector that job.py asks with, read from its source: importing it takes Monarch.
    source = (FOLDER / "job.py").read_text()
    labels = pod_templates()["gpus"]["metadata"]["labels"]
    assert f'"{",".join(f"{key}={label}" for key, label in labels.items())}"' in source
    # Monarch reads the port from the pod's own variable.
    (port,) = container("gpus")["ports"]
    assert variables("gpus")["MONARCH_PORT"] == str(port["containerPort"])
    assert variables("train")["GPUS_PODS"] == str(replicas("gpus"))


def test_the_configuration_fits_the_cluster() -> None:
    words = [word.replace("$(POD_IP)", "10.0.0.7") for word in container("train")["args"]]
    config = load_config(ROOT / "examples/grpo_blackjack/config.yaml", words)
    env, monarch, served = config.environment, config.monarch, variables("environment")
    servers = replicas("environment")
    assert env.url == tuple(f"http://environment-{index}.environment:8000" for index in range(servers))
    assert env.token_file == served["ROPEWALK_TOKEN_FILE"]
    assert env.sessions <= servers * int(served["ROPEWALK_MAX_SESSIONS"] or 0)
    assert served["ROPEWALK_ALLOWED_HOSTS"] == "*.environment"
    assert monarch.num_nodes == replicas("gpus")
    assert monarch.gpus_per_node == int(container("gpus")["resources"]["limits"]["nvidia.com/gpu"])
    assert monarch.roles.gpus() == monarch.num_nodes * monarch.gpus_per_node
    assert monarch.job == "examples.grpo_blackjack.kubernetes.job:pods"
    assert monarch.master_addr == "10.0.0.7"
    assert str(Path(str(variables("train")["RUN"])).parent) == config.output_dir == "/runs"
    # Every pod of the run sees it there.
    for name in RUN:
        mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
        assert mounts["runs"] == "/runs"
        # A library that writes beside itself would not find a place; these are for those that ask for one.
        assert {"/tmp", "/dev/shm"} < set(mounts.values())
    assert find("PersistentVolumeClaim", "runs")["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", JOINING)
def test_further_pods_find_the_controller_and_know_the_secret(name: str) -> None:
    words = container(name)["command"]
    arguments = dict(zip(words[3::2], words[4::2], strict=True))
    config = load_config(ROOT / "examples/grpo_blackjack/config.yaml", container("train")["args"])
    service = find("Service", "train")["spec"]
    (port,), (opened,) = service["ports"], container("train")["ports"]
    assert pod_templates()["train"]["metadata"]["labels"] == service["selector"]
    assert port["targetPort"] == opened["name"]
    assert opened["containerPort"] == port["port"] == config.monarch.join_port
    assert arguments == {
        "--join": f"tcp://train:{port['port']}",
        "--secret-file": f"{variables('train')['RUN']}/{SECRET_FILE}",
    }
    # SIGTERM is a notice, and the pods that follow join as these do: no index, no address of its own.
    assert pod_templates()[name]["spec"]["terminationGracePeriodSeconds"] > RELEASE_TIMEOUT_S
    assert find("Deployment", name)["spec"]["template"] is pod_templates()[name]
    # The pods of gpus.yaml are enough to start, and those that join are wanted.
    policy, workers = config.monarch.roles.policy, config.rollout.num_workers
    assert config.rollout.min_workers == policy.min_replicas == 1
    assert isinstance(workers, ReplicaRange)
    assert workers.max > sum(find("Deployment", each)["spec"]["replicas"] for each in JOINING)
    assert policy.max_replicas > find("Deployment", "generators")["spec"]["replicas"]


def test_referenced_objects_exist() -> None:
    existing = {(one["kind"], one["metadata"]["name"]) for one in OBJECTS}
    referenced = set(references(OBJECTS))
    assert referenced - existing == {
        ("Secret", "environment")
    }  # which the second of the three commands makes
    assert {kind for kind, _ in referenced} >= {"PersistentVolumeClaim", "ServiceAccount", "Service"}


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_hardened_bounded_and_probed(name: str) -> None:
    spec, one = pod_templates()[name]["spec"], container(name)
    assert spec["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items()
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)
    # The controller alone speaks to the API server, and nobody connects to it by a service.
    assert spec["automountServiceAccountToken"] is (name == "train")
    assert ("readinessProbe" in one) == (name not in {"train", *JOINING})
    assert ({"startupProbe", "livenessProbe"} <= set(one)) == (name not in JOINING)  # which end by themselves
    limits = one["resources"]["limits"]
    assert one["resources"]["requests"] == limits
    assert {"cpu", "memory", "ephemeral-storage"} <= set(limits)
    for volume in spec["volumes"]:
        assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], volume
    # Nodes with GPUs are for what computes on them; the device plugin finds those.
    without = {"key": "nvidia.com/gpu.present", "operator": "DoesNotExist"}
    required = {"nodeSelectorTerms": [{"matchExpressions": [without]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    assert spec.get("affinity") == (None if "nvidia.com/gpu" in limits else affinity)


def test_the_controller_may_look_at_pods_and_no_more() -> None:
    assert find("Role", "train")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


@pytest.mark.parametrize("source", RUN)
def test_the_processes_of_a_run_reach_each_other_and_the_environment(source: str) -> None:
    for target in RUN:
        assert may_reach(source, target, 26600)
        assert may_reach(source, target, 45678)
    assert may_reach(source, "environment", 8000)
    assert not may_reach(source, "environment", 22)
    assert may_reach(source, None, 53, namespace="kube-system")
    # Not the world, and the API server only for who has to ask it.
    assert not may_reach(source, None, 80)
    assert may_reach(source, None, 443) is (source == "train")


def test_nobody_else_reaches_anything() -> None:
    everything = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert find("NetworkPolicy", "nothing")["spec"] == everything  # also of a pod that no other policy names
    for target in PODS:
        for port in (26600, 8000, 29501):
            assert not may_reach(None, target, port)
    for target in (*RUN, "environment"):
        assert not may_reach("environment", target, 26600)
        assert not may_reach("environment", target, 8000)
    assert not may_reach("environment", None, 443)
    assert not may_reach("environment", None, 53, namespace="kube-system")


@pytest.mark.parametrize("left", [None, [], ["config.yaml"], ["logs"]])
def test_next_pod_resumes_a_run_that_has_begun(tmp_path: Path, left: list[str] | None) -> None:
    (tmp_path / "ropewalk").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "ropewalk").chmod(0o755)
    run = tmp_path / "runs/blackjack"
    run.parent.mkdir()
    if left is not None:
        run.mkdir()
        for name in left:
            (run / name).touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(run)}
    done = finished(*container("train")["command"], "a=b", "c=[d, e]", env=environment, timeout_s=30)
    new_run = ["--config", "examples/grpo_blackjack/config.yaml", "--name", "blackjack"]
    expected = ["--resume", str(run)] if left == ["config.yaml"] else new_run
    assert done.stdout.split() == ["train", *expected, "a=b", "c=[d,", "e]"]
    # What a run has written is nobody's to take away; a folder in which none began is one that the next may take.
    assert run.exists() == (left is not None)


# ---- docs/clusters.md

TEXT = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
KUBECTL, AFTERWARDS = (
    block.splitlines() for block in re.findall(r"^```\n(kubectl .*?)^```", TEXT, re.MULTILINE | re.DOTALL)
)


def test_three_commands_deploy_and_start() -> None:
    applied, secret, all_of_it = (shlex.split(line) for line in KUBECTL)
    namespace = find("Namespace", "ropewalk")["metadata"]["name"]
    assert applied[1:3] == ["apply", "-f"]
    assert (ROOT / applied[3]) == FOLDER / "namespace.yaml"
    assert secret[1:5] == ["create", "secret", "generic", "environment"]
    assert secret[5:7] == ["--namespace", namespace]
    (key,) = re.findall(r"^--from-literal=(\w+)=\$\(openssl rand -hex 32\)$", secret[7])
    (volume,) = (one for one in pod_templates()["environment"]["spec"]["volumes"] if one["name"] == "token")
    (mount,) = (one for one in container("environment")["volumeMounts"] if one["name"] == "token")
    assert volume["secret"]["secretName"] == secret[4]
    assert variables("environment")["ROPEWALK_TOKEN_FILE"] == f"{mount['mountPath']}/{key}"
    assert all_of_it == ["kubectl", "apply", "-k", str(FOLDER.relative_to(ROOT))]


def test_the_page_and_the_probes_ask_for_the_status_of_the_run() -> None:
    for line in AFTERWARDS:
        arguments = shlex.split(line, comments=True)
        assert arguments[arguments.index("--namespace") + 1] == "ropewalk"
        assert "train" in arguments or "job/train" in arguments
    (status,) = (line.partition(" -- ropewalk status ")[2] for line in AFTERWARDS if " exec " in line)
    assert parse_status(status).run == variables("train")["RUN"]
    for probe in ("startupProbe", "livenessProbe"):
        shell, option, line = container("train")[probe]["exec"]["command"]
        assert (shell, option) == ("/bin/sh", "-c")
        (arguments,) = re.findall(r"^ropewalk status (.*) >/dev/null$", line)
        assert parse_status(arguments).run == "$RUN"


def parse_status(arguments: str) -> argparse.Namespace:
    """What `ropewalk status` makes of its words; ends the test where it does not know them."""
    parser = argparse.ArgumentParser()
    STATUS.configure(parser)
    return parser.parse_args(shlex.split(arguments))


def test_the_page_names_keys_of_the_configuration_and_every_file() -> None:
    keys = re.findall(r"`((?:monarch|env|rollout|model)\.[a-z_.]+)(?:=[^`]*)?`", TEXT)
    assert len(set(keys)) > 8
    for key in keys:
        section, name = key.split(".")[:2]
        model = section_of(Config.model_fields[section].annotation)
        assert model is not None
        assert name in model.model_fields, key
    rows = set(re.findall(r"^\| `(\w+\.(?:yaml|py))` \|", TEXT, re.MULTILINE))
    assert rows == {*FILES, "job.py"}
