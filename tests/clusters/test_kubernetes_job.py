"""The job of the pods, for real: Monarch's KubernetesJob finds them, and a run trains on them.

The API server is a stand-in and the pods are processes with addresses of this machine's loopback; what runs in them is
what the manifests say.
"""

import contextlib
import copy
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from free_ports import free_port
from manifests import ROOT, container, pod_templates
from module_run import end, finished
from serve_process import eventually, serve

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

CONTROLLER = str(Path(__file__).with_name("pod_controller.py"))
ADDRESSES = {"gpus-0": "127.0.0.2", "gpus-1": "127.0.0.3", "cpus-0": "127.0.0.4", "cpus-1": "127.0.0.5"}
# Pods import the actors that are put into them, and so have to find them.
SOURCES = (str(ROOT), str(ROOT / "tests/rl_bridge/services"))
START_S = 120
RUN_S = 400
TOY = (
    "trainer.iterations=2",
    "rollout.batch_size=64",
    "env.sessions=16",
    "evaluation.episodes=64",
    "trainer.checkpoint_interval=1",
)
WITHOUT_GPUS = ("monarch.gpus_per_node=0", "monarch.roles.policy.gpus=0", "monarch.roles.trainer.gpus=0")


class Cluster:
    """Four workers, and an API server that shows them as pods."""

    def __init__(self, folder: Path) -> None:
        from api_server import ApiServer

        self.folder = folder
        self.port = free_port()
        self.api = ApiServer(folder, "ropewalk")
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What the controller's pod would find in its environment."""
        return {
            **os.environ,
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.api.port),
            "NAMESPACE": "ropewalk",
            "GPUS_PODS": "2",
            "PYTHONPATH": os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def start_workers(self) -> None:
        """Start each as the StatefulSet does."""
        for name, address in ADDRESSES.items():
            self.workers[name] = self.start(
                name, "gpus", {"$(POD_IP)": address, "$(MONARCH_PORT)": str(self.port)}
            )

    def start(self, name: str, kind: str, changes: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start what a manifest's container runs, with some texts of its command replaced."""
        command = container(kind)["command"]
        for old, new in changes.items():
            command = [word.replace(old, new) for word in command]
        assert command[0] == "python"
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command[1:]], cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )

    def show(self, name: str, *, ready: bool = True) -> None:
        """Have the API server show a pod."""
        from api_server import pod

        kind, _, index = name.partition("-")
        template = copy.deepcopy(pod_templates()["gpus"])
        template["metadata"]["labels"]["app.kubernetes.io/component"] = kind
        place = {"index": int(index), "ip": ADDRESSES[name], "port": self.port}
        self.api.put(pod(name, template, **place, ready=ready))

    def probe(self, name: str) -> bool:
        """What the kubelet does again and again: open a connection, and close it."""
        with contextlib.suppress(OSError), socket.create_connection((ADDRESSES[name], self.port), timeout=2):
            return True
        return False

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the command of the controller's pod."""
        return (sys.executable, CONTROLLER, str(self.folder), *arguments)

    def controller(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return finished(*self.command(*arguments), cwd=ROOT, env=self.environment, timeout_s=RUN_S)

    def close(self) -> None:
        for worker in self.workers.values():
            end(worker)


@contextlib.contextmanager
def training(folder: Path, join_port: int = 0) -> Iterator[list[str]]:
    """Serve the environment; yields the controller's words, those of the manifest with what differs here."""
    token = folder / "token"
    token.write_text("of-the-environment-0123456789")
    with serve(app="envs.blackjack_env.server.app:app", ROPEWALK_TOKEN_FILE=str(token)) as server:
        yield [
            *("train", "--config", "examples/grpo_blackjack/config.yaml", "--name", "run"),
            *(word.replace("$(POD_IP)", "127.0.0.1") for word in container("train")["args"]),
            *(f"output_dir={folder}", f"env.url=[http://{server.address}]", f"env.token_file={token}"),
            *(f"monarch.master_port={free_port()}", "monarch.coord_port=0", f"monarch.join_port={join_port}"),
            *WITHOUT_GPUS,
        ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    with cluster.api:
        try:
            cluster.start_workers()
            eventually(lambda: all(cluster.probe(name) for name in ADDRESSES), START_S)
            for _ in range(20):  # of many probes none does harm
                assert all(cluster.probe(name) for name in ADDRESSES)
            yield cluster
        finally:
            cluster.close()


@pytest.mark.soak
def test_replicas_are_put_on_the_pods_that_are_meant_for_them(cluster: Cluster, tmp_path: Path) -> None:
    for name in ADDRESSES:
        cluster.show(name, ready=name != "gpus-1")
    late = threading.Timer(3.0, cluster.show, ["gpus-1"])
    late.start()
    done = cluster.controller("hosts", str(tmp_path), f"tcp://127.0.0.1:{free_port()}")
    late.join()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    pids = {name: worker.pid for name, worker in cluster.workers.items()}
    assert found["needy"] == [pids["gpus-0"], pids["gpus-1"]]
    assert found["modest"] == [pids["cpus-0"], pids["cpus-1"]]
    assert found["versions"] == [3, 3]
    labels = "app.kubernetes.io/name=ropewalk,app.kubernetes.io/component="
    assert set(cluster.api.asked) == {("ropewalk", f"{labels}gpus"), ("ropewalk", f"{labels}cpus")}
    # The pods were found, not made: they are still there, for the next run.
    assert all(worker.poll() is None for worker in cluster.workers.values())


def test_a_run_trains_on_the_pods_with_the_words_of_the_manifest(cluster: Cluster, tmp_path: Path) -> None:
    for name in ADDRESSES:
        cluster.show(name)
    with training(tmp_path) as words:
        done = cluster.controller(*words, *TOY)
    logs = tmp_path / "run/logs"
    tails = [f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs.glob("*")] if logs.exists() else []
    assert done.returncode == 0, "\n".join([done.stdout[-2000:], done.stderr[-3000:], *tails])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all(row["mismatch/logprob_max"] <= 1e-4 for row in rows)
    assert json.loads((tmp_path / "run/report.json").read_text())["hands"] == 64
    assert all(worker.poll() is None for worker in cluster.workers.values())


@pytest.mark.soak
def test_a_pod_that_replaces_another_joins_the_run_in_progress(cluster: Cluster, tmp_path: Path) -> None:
    for name in ADDRESSES:
        cluster.show(name)
    port = free_port()
    place = {"tcp://train:29502": f"tcp://127.0.0.1:{port}", "/runs/blackjack": str(tmp_path / "run")}

    def joined() -> int:
        command = (
            sys.executable,
            "-m",
            "openenv_core.cli",
            "status",
            "--run",
            str(tmp_path / "run"),
            "--json",
        )
        shown = finished(*command, cwd=ROOT, timeout_s=60)
        return (
            0
            if shown.returncode
            else sum(e["what"].startswith("joined:") for e in json.loads(shown.stdout)["events"])
        )

    with training(tmp_path, port) as words, (tmp_path / "output").open("wb") as output:
        command = cluster.command(*words, *TOY, "trainer.iterations=100000")
        controller = subprocess.Popen(
            command, cwd=ROOT, env=cluster.environment, stdout=output, stderr=output
        )
        pods = [cluster.start(f"{kind}-0", kind, place) for kind in ("cpus", "generators")]
        try:
            for number in (2, 3, 4):
                eventually(lambda number=number: joined() == number or controller.poll(), START_S)
                assert controller.poll() is None, (tmp_path / "output").read_text()[-3000:]
                if number < 4:
                    pods[-1].kill()
                    pods.append(cluster.start(f"cpus-{number}", "cpus", place))
            controller.terminate()
            assert controller.wait(120) == 130
            assert [pods[0].wait(60), pods[-1].wait(60)] == [0, 0]
        finally:
            for process in (controller, *pods):
                end(process)
