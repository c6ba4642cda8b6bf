"""BlackJack under a real Slurm: interrupted when its time is over and queued up again, and with nodes that join."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from free_ports import free_ports
from module_run import finished
from namespaces import inside, namespaces
from slurm_node import SlurmNode, require_slurm

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
ITERATIONS = 20
"""More than it gets to before the signal is delivered."""
TOY = (
    f"trainer.iterations={ITERATIONS}",
    "rollout.batch_size=64",
    "env.sessions=16",
    "evaluation.episodes=64",
    "trainer.checkpoint_interval=1",
)
START_S = 900
SCRIPTS = ROOT / "examples/grpo_blackjack/slurm"
NODES = 4
TASKS = 4
REQUEUED = (1, 3)
JOIN_PORT = 29502


def iterations(folder: Path) -> list[int]:
    metrics = folder / "runs/toy/metrics.jsonl"
    if not metrics.exists():
        return []
    return [json.loads(line)["iteration"] for line in metrics.read_text().splitlines() if line.endswith("}")]


def prepare(folder: Path, port: int) -> list[str]:
    """Make a folder to run in; return the options of a job there, whose script takes this port and the next two."""
    (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = f"ALL,ROPEWALK_VENV={sys.prefix},PYTHONPATH={path},RUN=toy,MONARCH_PORT={port}"
    return [f"--chdir={folder}", f"--export={variables}"]


def test_a_job_trains_and_goes_on_where_its_time_was_over(tmp_path: Path) -> None:
    script = str(SCRIPTS / "train.sbatch")
    with SlurmNode(require_slurm()) as slurm:
        options = [*prepare(tmp_path, free_ports(3)[0]), "--output=job.log", "--cpus-per-task=2"]
        job = slurm.run("sbatch", "--parsable", *options, script, *TOY).strip()
        log = tmp_path / "job.log"
        deadline = time.monotonic() + START_S
        while not iterations(tmp_path):
            log_tail = log.read_text()[-3000:] if log.exists() else ""
            assert slurm.state(job) in {"PENDING", "RUNNING"}, log_tail
            assert time.monotonic() < deadline, log_tail
            time.sleep(0.2)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        slurm.wait(job, "PENDING", timeout_s=300)
        # Slurm itself would wait for two minutes: the end of what is requeued is not to be taken for the next one's.
        slurm.wait_idle(timeout_s=300)
        before = iterations(tmp_path)
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        ended = slurm.wait(job, "COMPLETED", "FAILED", timeout_s=START_S)
        assert ended == "COMPLETED", log.read_text()[-3000:] + slurm.logs()
    assert 1 <= len(before) < ITERATIONS
    assert re.search(r"go on after iteration \d+ with: ropewalk train --resume runs/toy", log.read_text())
    assert iterations(tmp_path) == list(range(1, ITERATIONS + 1))
    assert json.loads((tmp_path / "runs/toy/report.json").read_text())["hands"] == 64


def test_tasks_of_an_array_join_a_job_and_join_again_when_half_of_them_are_requeued(tmp_path: Path) -> None:
    with (
        namespaces(NODES) as (controller, hosts),
        SlurmNode(require_slurm(), hosts, controller) as slurm,
    ):
        options = [*prepare(tmp_path, 26700), "--cpus-per-task=1"]
        words = [
            *(*TOY, "trainer.iterations=100000", f"monarch.join_port={JOIN_PORT}"),
            *("rollout.num_workers={min: 1, max: 9}", "rollout.spot_eligible=true"),
        ]
        place = ["--nodelist=node1", "--output=job.log"]
        job = slurm.run(
            "sbatch", "--parsable", *place, *options, str(SCRIPTS / "train.sbatch"), *words
        ).strip()
        place = [f"--array=1-{TASKS}", "--exclude=node1", "--output=join-%a.log"]
        words = [f"tcp://node1:{JOIN_PORT}", "runs/toy"]
        array = slurm.run(
            "sbatch", "--parsable", *place, *options, str(SCRIPTS / "join.sbatch"), *words
        ).strip()
        run = [sys.executable, "-m", "openenv_core.cli", "status", "--run", "runs/toy", "--json"]

        def events(what: str) -> int:
            shown = finished(
                *inside(hosts[0].namespace), *run, cwd=tmp_path, env=slurm.environment, timeout_s=60
            )
            found = json.loads(shown.stdout)["events"] if shown.returncode == 0 else []
            return sum(event["what"].startswith(f"{what}:") for event in found)

        def wait(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + START_S
            while not condition():
                log = tmp_path / "job.log"
                about = (log.read_text()[-3000:] if log.exists() else "") + slurm.logs()
                assert slurm.state(job) in {"PENDING", "RUNNING"}, about
                assert time.monotonic() < deadline, about
                time.sleep(1)

        def go_on() -> None:
            trained = len(iterations(tmp_path))
            wait(lambda: len(iterations(tmp_path)) >= trained + 3)

        wait(lambda: events("joined") == TASKS)
        go_on()
        for task in REQUEUED:
            slurm.run("scontrol", "requeue", f"{array}_{task}")
        go_on()
        for task in REQUEUED:
            slurm.wait(f"{array}_{task}", "PENDING", timeout_s=300)
            slurm.run("scontrol", "update", f"JobId={array}_{task}", "StartTime=now")
        wait(lambda: events("joined") == TASKS + len(REQUEUED))
        go_on()
        slurm.run("scancel", "--batch", "--signal=TERM", job)
        assert slurm.wait(job, "COMPLETED", "FAILED", timeout_s=START_S) == "FAILED"  # with status 130
        for task in range(1, TASKS + 1):
            log = tmp_path / f"join-{task}.log"
            state = slurm.wait(f"{array}_{task}", "COMPLETED", "FAILED", timeout_s=300)
            assert state == "COMPLETED", log.read_text()
            assert log.read_text().count("joining the run") == 1 + (task in REQUEUED)
        slurm.wait_idle(timeout_s=300)
    numbers = iterations(tmp_path)
    assert numbers == list(range(1, len(numbers) + 1))
    groups = [json.loads(line) for line in (tmp_path / "runs/toy/groups.jsonl").read_text().splitlines()]
    trained = [group for each in groups for group in each["trained"]]
    assert len(trained) == len(set(trained)) == len(numbers) * 64 // 4
    print(f"{len(numbers)} iterations, {len(trained)} groups")  # noqa: T201
