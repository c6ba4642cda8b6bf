"""Fleets on a mock of Kubernetes' API, by the official client: which objects there are. No server runs."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_http import running
from mock_cluster import MockCluster

from envs.blackjack_env import BlackjackEnv
from openenv_core import make
from openenv_core.cli.fleet import COMMAND
from openenv_core.compat.containers import KubernetesProvider
from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.providers import ClaimFleet, KubernetesFleet
from openenv_core.providers.fleet import Load
from openenv_core.providers.kubernetes import INSTANCE, OWNER

pytestmark = pytest.mark.slow  # the client takes seconds to import

CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/play/sandboxclaims"
IMAGE = "registry.example.org/team/blackjack-env:1.0"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockCluster]:
    mock = MockCluster()
    mock.write_kubeconfig(tmp_path / "config", "play")
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config")
    )
    monkeypatch.setattr("openenv_core.providers.fleet.POLL_INTERVAL_S", 0.01)
    with running(mock.server):
        yield mock


def test_a_fleet_is_a_stateful_set_and_what_it_owns(cluster: MockCluster) -> None:
    with KubernetesFleet(IMAGE, 3, name="games") as fleet:
        assert fleet.urls() == [f"http://games-{number}.games.play.svc:8000" for number in range(3)]
        assert fleet.start() in fleet.urls()  # a client that gets a running fleet starts it again
        assert (
            cluster.names("statefulsets")
            == cluster.names("services")
            == cluster.names("secrets")
            == ["games"]
        )
        cluster.unready = {"games-1"}
        assert [server.ready for server in fleet.servers()] == [True, False, True]
        cluster.unready = set()
        found = KubernetesFleet.find("games")
        assert (found.token, found.urls()) == (fleet.token, fleet.urls())
        found.scale(2)
        found.scale(4)
        assert cluster.names("pods") == [f"games-{number}" for number in range(4)]
        pod = cluster.objects["/api/v1/namespaces/play/pods/games-1"]["metadata"]["uid"]
        fleet.replace("games-1")
        assert cluster.objects["/api/v1/namespaces/play/pods/games-1"]["metadata"]["uid"] != pod
        with pytest.raises(ProviderError, match="games-7"):
            fleet.replace("games-7")
        with pytest.raises(ProviderError, match="already"):
            KubernetesFleet(IMAGE, 1, name="games").start()
    assert cluster.objects == {}
    with pytest.raises(ProviderError, match="404"):
        KubernetesFleet.find("games")


def test_a_pod_stays_if_clients_wait_before_it_leaves(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KubernetesFleet(IMAGE, 2, name="games") as fleet:
        pods = {path: each for path, each in cluster.objects.items() if "/pods/" in path}
        loads = iter([Load(slots=8, in_use=1, waiting=0), Load(slots=8, in_use=8, waiting=3)])
        monkeypatch.setattr(fleet, "load", lambda: next(loads))
        looks = iter(range(2))
        with pytest.raises(StopIteration):
            fleet.autoscale(1, 2, lambda: next(looks))
        assert {path: each for path, each in cluster.objects.items() if "/pods/" in path} == pods


def test_a_fleet_that_was_never_started_leaves_another_of_its_name_alone(cluster: MockCluster) -> None:
    with KubernetesFleet(IMAGE, 1, name="games"):
        make(IMAGE, client=BlackjackEnv, fleet="kubernetes", name="games").close()
        assert cluster.names("pods") == ["games-0"]
        cluster.objects["/apis/apps/v1/namespaces/play/statefulsets/games"]["spec"]["replicas"] = 0
        KubernetesFleet.find("games").stop()
        assert cluster.objects == {}


@pytest.mark.parametrize(("least", "most", "expected"), [(3, 4, 3), (1, 1, 1)])
def test_autoscaling_keeps_to_its_bounds_without_load(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, least: int, most: int, expected: int
) -> None:
    with KubernetesFleet(IMAGE, 2, name="games") as fleet:
        monkeypatch.setattr(fleet, "load", lambda: Load(slots=8, in_use=8, waiting=0))
        looks = iter(range(3))
        with pytest.raises(StopIteration):
            fleet.autoscale(least, most, lambda: next(looks))
        assert len(cluster.names("pods")) == expected


def test_fleets_of_programs_that_were_killed_are_swept(cluster: MockCluster, tmp_path: Path) -> None:
    for name, detached in (("kept", True), ("mine", False), ("orphan", False)):
        KubernetesFleet(IMAGE, 1, name=name, detached=detached).start()
    pid = "import os; from openenv_core.providers.docker.sweeper import owner; print(owner())"
    ended = subprocess.run(
        [sys.executable, "-c", pid], capture_output=True, text=True, timeout=60, check=True
    )
    orphan = cluster.objects["/apis/apps/v1/namespaces/play/statefulsets/orphan"]
    assert OWNER in orphan["metadata"]["annotations"]
    orphan["metadata"]["annotations"][OWNER] = ended.stdout.strip()
    KubernetesFleet(IMAGE, 1, name="next").start()
    assert cluster.names("statefulsets") == cluster.names("secrets") == ["kept", "mine", "next"]


@pytest.fixture
def secret(cluster: MockCluster) -> str:
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "stringData": {"token": "of-keys"},
    }
    cluster.create("/api/v1/namespaces/play/secrets", body)
    return "keys"


def test_a_fleet_of_claims_on_a_warm_pool(cluster: MockCluster, secret: str) -> None:
    with ClaimFleet("warm", 3, secret=secret, name="games") as fleet:
        assert fleet.token == "of-keys"
        assert [server.name for server in fleet.servers()] == cluster.names("sandboxclaims")
        assert all(url.startswith("http://10.1.0.") for url in fleet.urls())
        cluster.unready = {"games-1"}
        assert [server.ready for server in fleet.servers()] == [True, False, True]
        cluster.unready = set()
        found = ClaimFleet.find("games")
        assert (found.token, found.urls()) == (fleet.token, fleet.urls())
        before = cluster.objects[f"{CLAIMS}/games-1"]["metadata"]["uid"]
        fleet.replace("games-1")
        assert cluster.objects[f"{CLAIMS}/games-1"]["metadata"]["uid"] != before
        found._resize(2)
        assert cluster.names("sandboxclaims") == ["games-0", "games-1"]
        # Of a program that was killed.
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                "import os; from openenv_core.providers.docker.sweeper import owner; print(owner())",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        for each in cluster.objects.values():
            each["metadata"].get("annotations", {}).update({OWNER: ended.stdout.strip()})
        with ClaimFleet("warm", 1, secret=secret, name="next"):
            assert cluster.names("sandboxclaims") == ["next-0"]
    assert cluster.names("sandboxclaims") == []
    with pytest.raises(ProviderError, match="WarmPoolNotFound"):
        ClaimFleet("cold", 1, secret=secret, name="games").start()
    assert cluster.names("sandboxclaims") == []
    with pytest.raises(ProviderError, match="404"):
        ClaimFleet("warm", 1, secret="missing")


def test_a_fleet_of_claims_is_started_again_by_its_name(
    cluster: MockCluster, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv_core.providers.fleet.read_load", lambda url, token: None)
    file = tmp_path / "games.token"
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    options = ["--options", f'{{"secret": "{secret}"}}', "--token-file", str(file)]
    up = parser.parse_args(["up", "agent-sandbox", "games", "warm", *options])
    for _ in range(2):
        COMMAND.run(up)
        assert file.read_text() == "of-keys\n"
        COMMAND.run(parser.parse_args(["down", "agent-sandbox", "games"]))
        assert cluster.names("sandboxclaims") == []
    file.write_text("of-another-time\n")
    with pytest.raises(ConfigurationError, match="does not have the servers' token"):
        COMMAND.run(up)
    assert cluster.names("sandboxclaims") == []


@pytest.mark.soak
def test_agent_sandbox_s_own_client_knows_the_claims(cluster: MockCluster, secret: str) -> None:
    helper = pytest.importorskip("k8s_agent_sandbox.k8s_helper").K8sHelper()
    with ClaimFleet("warm", 2, secret=secret, name="games") as fleet:
        assert helper.list_sandbox_claims("play", f"{INSTANCE}=games") == ["games-0", "games-1"]
        claim = helper.get_sandbox_claim("games-0", "play")
        # It accepts ours as one that it has made, and sees that its sandbox is ready.
        own = pytest.importorskip("k8s_agent_sandbox.claim_adoption")
        claim["metadata"]["resourceVersion"] = "1"
        own.validate_claim_for_adoption(claim, "games-0", "warm")
        helper.create_sandbox_claim("games-2", "warm", "play", labels={INSTANCE: "games"})
        made = cluster.objects[f"{CLAIMS}/games-2"]
        assert (made["apiVersion"], made["kind"]) == (claim["apiVersion"], claim["kind"])
        assert made["spec"] == claim["spec"]
        assert len(fleet.urls()) == 3
        helper.delete_sandbox_claim("games-1", "play")
        assert [server.name for server in fleet.servers()] == ["games-0", "games-2"]


def test_the_released_provider_starts_a_pod(cluster: MockCluster) -> None:
    provider = KubernetesProvider(name="one", token="of-the-environment-0123456789")
    url = provider.start_container(IMAGE, env_vars={"ROPEWALK_MAX_SESSIONS": "4"})
    provider.wait_for_ready(url)
    assert url == "http://one-0.one.play.svc:8000"
    (container,) = cluster.objects["/api/v1/namespaces/play/pods/one-0"]["spec"]["containers"]
    assert {"name": "ROPEWALK_MAX_SESSIONS", "value": "4"} in container["env"]
    with pytest.raises(ConfigurationError, match="stop_container"):
        provider.start_container(IMAGE)
    provider.stop_container()
    assert cluster.objects == {}
