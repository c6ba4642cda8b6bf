"""BlackJack trained while hosts join, leave after a notice, and are killed; network namespaces stand for the hosts."""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from e2e.conftest import CONFIG, ROOT, Watched, rows
from namespaces import CONTROLLER_ADDRESS, NamespaceHost, inside, namespaces, needs_namespaces
from serve_process import eventually

pytestmark = [pytest.mark.soak, pytest.mark.heavy, pytest.mark.timeout(1800), needs_namespaces]

ITERATIONS = 30
HOSTS = 4
LATE_HOSTS = 3
CONTROLLER = f"tcp://{CONTROLLER_ADDRESS}:29502"
LAST = 10
"""Iterations at the end over which rewards are compared."""
MAX_REWARD_DIFFERENCE = 0.1
"""Between the last iterations of a disturbed and an undisturbed run; hands pay -1, 0 or 1 (-2 for no answer)."""
RUN_S = 900.0


class ElasticRun:
    """A run on the controller's host, and the hosts that join it."""

    def __init__(self, folder: Path, controller: str, seed: int, *arguments: str) -> None:
        self.folder = folder / "run"
        self._controller = controller
        self._outputs = folder
        self.events: dict[tuple[Any, ...], None] = {}
        self.versions: dict[int, int | None] = {}
        """The weights that each generator serves."""
        self.players: set[str] = set()
        """Workers that were seen at play."""
        token = folder / "token"
        token.write_text(secrets.token_hex(16))
        port = 8000
        self.server = self._start(
            controller,
            *("openenv_core.cli", "serve", "envs.blackjack_env.server.app:app"),
            *("--host", CONTROLLER_ADDRESS, "--port", str(port), "--token-file", str(token)),
        )
        self.run = self._start(
            controller,
            *("openenv_core.cli", "train", "--config", CONFIG, "--name", "run", "--seed", str(seed)),
            *(f"output_dir={folder}", "env.app=null", f"env.url=http://{CONTROLLER_ADDRESS}:{port}"),
            *(f"env.token_file={token}", "env.sessions=32", "rollout.num_workers={min: 1, max: 8}"),
            *("monarch.roles.policy.replicas={min: 1, max: 2}", "monarch.join_port=29502"),
            *(f"monarch.master_addr={CONTROLLER_ADDRESS}", f"monarch.preemption_notice_file={folder}/notice"),
            *("rollout.batch_size=512", "rollout.max_staleness=1", "rollout.spot_eligible=true"),
            *(f"trainer.iterations={ITERATIONS}", "evaluation.interval=0", "evaluation.episodes=64"),
            *arguments,
        )

    def _start(self, namespace: str, *arguments: str) -> Watched:
        output = self._outputs / f"output-{len(list(self._outputs.glob('output-*')))}.txt"
        return Watched([*inside(namespace), sys.executable, "-m", *arguments], output)

    def join(self, host: NamespaceHost) -> Watched:
        secret = str(self.folder / "join.secret")
        arguments = ("rl_bridge.services.worker", "--join", CONTROLLER, "--secret-file", secret)
        return self._start(host.namespace, *arguments)

    def observe(self) -> None:
        """Take in what the run's status says of its events."""
        command = [sys.executable, "-m", "openenv_core.cli", "status", "--run", str(self.folder), "--json"]
        reply = subprocess.run(
            [*inside(self._controller), *command], capture_output=True, text=True, cwd=ROOT, check=False
        )
        if reply.returncode == 0:
            status = json.loads(reply.stdout)
            self.players |= {lease["worker"] for lease in status["leases"]}
            self.versions = {
                replica["id"]: replica["version"]
                for service in status["services"]
                for replica in service["replicas"]
                if service["name"] == "policy" and replica["state"] == "serving"
            }
            for event in status["events"]:
                self.events[event["at"], event["service"], event["replica"], event["what"]] = None

    def starts(self, service: str) -> dict[int, float]:
        """Return how many seconds each replica of a service took until it served for the first time."""
        begun: dict[int, float] = {}
        took: dict[int, float] = {}
        for at, name, replica, what in sorted(self.events):
            if name == service and what == "starting":
                begun.setdefault(replica, at)
            elif name == service and what == "serving" and replica in begun:
                took.setdefault(replica, at - begun[replica])
        return took

    def until_iteration(self, number: int) -> None:
        def reached() -> bool:
            self.observe()
            return (self.folder / "metrics.jsonl").exists() and len(rows(self.folder)) >= number

        self.run.until(reached, f"expected iteration {number}", RUN_S)


@contextmanager
def elastic_run(folder: Path, seed: int, *arguments: str) -> Iterator[tuple[ElasticRun, list[NamespaceHost]]]:
    folder.mkdir()
    with namespaces(HOSTS + LATE_HOSTS) as (controller, hosts):
        run = ElasticRun(folder, controller, seed, *arguments)
        try:
            yield run, hosts
        finally:
            run.server.process.terminate()
            for watched in (run.run, run.server):
                watched.kill_all()
            for host in hosts:
                for pid in host.pids():
                    os.kill(pid, signal.SIGKILL)


def last_reward(folder: Path) -> float:
    return fmean(row["rollout/reward_mean"] for row in rows(folder)[-LAST:])


@pytest.mark.parametrize("seed", [1])
def test_run_goes_on_whatever_hosts_come_and_go(tmp_path: Path, seed: int) -> None:
    with elastic_run(tmp_path / "undisturbed", seed) as (quiet, _):
        assert quiet.run.wait(RUN_S) == 0, quiet.run.output()[-3000:]
    rng = random.Random(seed)
    with elastic_run(tmp_path / "disturbed", seed) as (elastic, hosts):
        watched = [elastic.join(host) for host in hosts[:HOSTS]]

        def kill(index: int) -> None:
            for pid in hosts[index].pids():
                os.kill(pid, signal.SIGKILL)

        def notify(index: int) -> None:
            watched[index].process.send_signal(signal.SIGTERM)

        def join(index: int) -> None:
            watched.append(elastic.join(hosts[index]))

        victims = rng.sample(range(HOSTS), 3)
        acts: list[tuple[Callable[[int], None], int]] = [
            *((kill, index) for index in victims[:2]),
            (notify, victims[2]),
            *((join, HOSTS + index) for index in range(LATE_HOSTS)),
        ]
        rng.shuffle(acts)
        for number, (act, index) in zip(sorted(rng.sample(range(3, 22), len(acts))), acts, strict=True):
            elastic.until_iteration(number)
            print(f"iteration {number}: {act.__name__} host {index}")  # noqa: T201
            act(index)
        elastic.until_iteration(ITERATIONS - 1)
        assert elastic.run.wait(RUN_S) == 0, elastic.run.output()[-3000:]
        for host in hosts:
            eventually(lambda host=host: host.pids() == [])
        for index in set(range(HOSTS + LATE_HOSTS)) - set(victims[:2]):
            assert watched[index].wait(60) == 0, watched[index].output()

    metrics = rows(elastic.folder)
    assert [row["iteration"] for row in metrics] == list(range(1, ITERATIONS + 1))
    # Each group was trained once, by no weights older than allowed.
    trained = [
        group
        for line in (elastic.folder / "groups.jsonl").read_text().splitlines()
        for group in json.loads(line)["trained"]
    ]
    assert len(trained) == len(set(trained)) == ITERATIONS * 512 // 4
    ages = {int(key.rpartition("/")[2]) for row in metrics for key in row if "rollout/staleness/" in key}
    assert ages <= {0, 1}
    took = {service: elastic.starts(service) for service in ("rollout", "policy")}
    rewards = last_reward(quiet.folder), last_reward(elastic.folder)
    print(took, elastic.players, rewards, sorted(elastic.events))  # noqa: T201
    assert len(took["rollout"]) > LATE_HOSTS
    assert len(elastic.players - {"rollout-0", "-"}) > 1, elastic.players
    for starts in took.values():
        assert max(starts.values()) <= 3 * starts[0]
    assert abs(rewards[1] - rewards[0]) <= MAX_REWARD_DIFFERENCE


def test_generator_that_joins_serves_the_weights_of_the_run(tmp_path: Path) -> None:
    with elastic_run(tmp_path / "folder", 1, "trainer.iterations=10000") as (elastic, hosts):
        host = elastic.join(hosts[0])

        def serves() -> bool:
            elastic.observe()
            return (elastic.versions.get(1) or 0) > 0

        elastic.run.until(serves, "expected a second generator with trained weights", RUN_S)
        host.process.send_signal(signal.SIGTERM)
        assert host.wait(120) == 0, host.output()
        elastic.until_iteration(len(rows(elastic.folder)) + 3)
        assert set(elastic.versions) == {0}
        elastic.run.process.send_signal(signal.SIGTERM)
        assert elastic.run.wait(200) == 130, elastic.run.output()[-3000:]
        eventually(lambda: hosts[0].pids() == [])
        took = elastic.starts("policy")
        print(took)  # noqa: T201
        assert took[1] <= 3 * took[0]
