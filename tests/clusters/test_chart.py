"""The Helm chart of environment servers, and the hook of its pods.

What helm makes of the chart is checked by hand, since CI has no helm: `pytest -m soak tests/clusters/test_chart.py`
with helm on the PATH. It needs no cluster.
"""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from manifests import ROOT
from missing import missing
from module_run import finished
from serve_process import eventually, serve

from openenv_core.client.tools import MCPToolClient
from openenv_core.errors import CapacityError
from openenv_core.providers.kubernetes import WAIT_FOR_SESSIONS

pytestmark = pytest.mark.slow

CHART = ROOT / "dockerfiles/chart"
VALUES = sorted(CHART.glob("values*.yaml"))
OLDEST = "1.29"
TOKEN = "of-the-environment-0123456789"


@pytest.fixture
def helm() -> None:
    if shutil.which("helm") is None:
        missing("needs helm; see https://helm.sh/docs/intro/install")


def template(values: Path, *options: str) -> list[dict[str, Any]]:
    command = ("helm", "template", "games", CHART, "--namespace", "play", "--values", values, *options)
    done = finished(*command, timeout_s=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.soak
@pytest.mark.usefixtures("helm")
@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_chart_makes_what_the_api_takes(values: Path) -> None:
    linted = finished("helm", "lint", "--strict", CHART, "--values", values, timeout_s=60)
    assert linted.returncode == 0, linted.stdout
    objects = template(values)
    kinds = [one["kind"] for one in objects]
    expected = {"StatefulSet", "Service", "Secret", "NetworkPolicy", "PodDisruptionBudget"}
    autoscaled = {"HorizontalPodAutoscaler"} if "autoscaling" in values.stem else set()
    assert sorted(kinds) == sorted(expected | autoscaled)
    for version in (OLDEST, kubernetes_validate.latest_version()):
        for one in objects:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.soak
@pytest.mark.usefixtures("helm")
def test_pods_of_the_chart_are_those_of_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from local_http import running
    from mock_cluster import MockCluster

    from openenv_core.providers import KubernetesFleet

    cluster = MockCluster()
    cluster.write_kubeconfig(tmp_path / "config", "play")
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config")
    )
    with running(cluster.server):
        KubernetesFleet("blackjack-env:latest", 2, name="games", detached=True).start()
    made = cluster.objects["/apis/apps/v1/namespaces/play/statefulsets/games"]["spec"]
    (found,) = (one["spec"] for one in template(CHART / "values.yaml") if one["kind"] == "StatefulSet")
    (container,) = found["template"]["spec"]["containers"]
    del container["imagePullPolicy"]
    container["env"].remove({"name": "ROPEWALK_MAX_SESSIONS", "value": "512"})
    for resources in container["resources"].values():
        del resources["ephemeral-storage"]
    (provided,) = made["template"]["spec"]["containers"]
    provided["resources"] = {key: {**each, "cpu": "1"} for key, each in provided["resources"].items()}
    assert found == json.loads(json.dumps(made))


def test_the_chart_has_the_hook_of_the_provider() -> None:
    chart = (CHART / "templates/statefulset.yaml").read_text()
    assert textwrap.indent(WAIT_FOR_SESSIONS, " " * 20) in chart


def refuses(url: str) -> bool:
    """Whether a server refuses a session because it is stopping."""
    try:
        with MCPToolClient(url, token=TOKEN, queue_timeout_s=0).sync() as env:
            env.reset()
    except CapacityError as error:
        return "is stopping" in str(error)
    return False


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_hook_of_a_pod_that_is_to_end_waits_for_its_sessions(tmp_path: Path, workers: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with serve("--workers", workers, app="tally:app", ROPEWALK_TOKENS=TOKEN) as server:
        hook = WAIT_FOR_SESSIONS.replace("kill(1,", f"kill({server.process.pid},")
        hook = hook.replace("/etc/ropewalk", str(tmp_path)).replace(":8000", f":{server.port}")
        url = f"http://{server.address}"
        with MCPToolClient(url, token=TOKEN).sync() as env:
            env.reset()
            process = subprocess.Popen([sys.executable, "-IS", "-c", hook])
            eventually(lambda: refuses(url))
            assert process.poll() is None
            assert [env.call_tool("add", amount=1) for _ in range(3)] == [1, 2, 3]
        assert process.wait(60) == 0
