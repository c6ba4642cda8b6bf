"""The batch script under a real Slurm of one node: what it starts, what its end means. Ropewalk is a stand-in."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slurm_node import SlurmNode, require_slurm

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/grpo_blackjack/slurm/train.sbatch"

ON_CPUS = ["monarch.roles.policy.gpus=0", "monarch.roles.trainer.gpus=0"]

# What is called is written down; a run that is told to go says so by its status, as ropewalk's does.
ROPEWALK = """#!/bin/bash
if [[ $1 == serve ]]; then
  echo "$* for $ROPEWALK_ALLOWED_HOSTS by a token of $(wc -c < "$ROPEWALK_TOKEN_FILE")" >> calls
  while :; do sleep 0.1; done
fi
trap 'echo told >> calls; exit 130' TERM
mkdir -p "runs/$RUN" && touch "runs/$RUN/config.yaml"
echo "$*" >> calls
case $* in *--resume*) exit 0 ;; esac
case $* in *fail=yes*) exit 3 ;; esac
while [[ $* == *stay=yes* ]]; do sleep 0.1; done
"""
WORKER = """#!/bin/bash
echo "worker $*" >> calls
trap 'echo "worker gone" >> calls; exit 0' TERM
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmNode]:
    with SlurmNode(require_slurm()) as node:
        yield node


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("ropewalk", ROPEWALK), ("python", WORKER)):
        path = tmp_path / "venv/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def submit(slurm: SlurmNode, folder: Path, *words: str) -> str:
    variables = f"ALL,ROPEWALK_VENV={folder}/venv,MONARCH_PORT=26700,RUN=seven"
    options = [f"--chdir={folder}", f"--export={variables}", "--output=job.log"]
    return slurm.run("sbatch", "--parsable", *options, str(SCRIPT), *words).strip()


def calls(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


def until_called(folder: Path, line: str) -> None:
    deadline = time.monotonic() + 60
    while not any(called.startswith(line) for called in calls(folder)):
        assert time.monotonic() < deadline, calls(folder)
        time.sleep(0.1)


def test_a_worker_a_node_and_the_controller_that_knows_them(slurm: SlurmNode, folder: Path) -> None:
    job = submit(slurm, folder, "stay=yes", "trainer.iterations=3")
    until_called(folder, "worker ")
    until_called(folder, "serve ")
    until_called(folder, "train ")
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    assert slurm.wait(job, "COMPLETED", "FAILED", timeout_s=60) == "FAILED"
    assert "ExitCode=130:0" in slurm.run("scontrol", "show", "job", "-o", job)
    until_called(folder, "worker gone")
    (trained,) = (call for call in calls(folder) if call.startswith("train "))
    assert trained.replace(str(folder), "HERE").split() == [
        *("train", "--config", "examples/grpo_blackjack/config.yaml", "--name", "seven", *ON_CPUS),
        *("output_dir=runs", "env.app=null"),
        *("env.url=[http://localhost:26702]", "env.token_file=HERE/runs/.seven.token"),
        *("monarch.workers=[tcp://localhost:26700]", "monarch.num_nodes=1", "monarch.gpus_per_node=0"),
        *("monarch.master_addr=localhost", "monarch.master_port=26701"),
        *("rollout.checkpoint_on_preemption=true", "stay=yes", "trainer.iterations=3"),
    ]
    others = [call for call in calls(folder) if call.startswith(("worker -", "serve"))]
    assert sorted(others) == [
        "serve envs.blackjack_env.server.app:app --host 0.0.0.0 --port 26702 for localhost by a token of 64",
        "worker -m rl_bridge.services.worker tcp://localhost:26700",
    ]
    assert (folder / "runs/.seven.token").stat().st_mode & 0o077 == 0


def test_the_status_of_the_run_is_that_of_the_job(slurm: SlurmNode, folder: Path) -> None:
    job = submit(slurm, folder, "fail=yes")
    assert slurm.wait(job, "COMPLETED", "FAILED", timeout_s=60) == "FAILED"
    assert "ExitCode=3:0" in slurm.run("scontrol", "show", "job", "-o", job)
    assert "told" not in calls(folder)


def test_a_job_whose_time_is_over_queues_up_again_and_goes_on(slurm: SlurmNode, folder: Path) -> None:
    job = submit(slurm, folder, "stay=yes")
    until_called(folder, "train ")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(job, "PENDING", timeout_s=60)
    slurm.wait_idle(timeout_s=120)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert slurm.wait(job, "COMPLETED", "FAILED", timeout_s=120) == "COMPLETED"
    first, second = (call for call in calls(folder) if call.startswith("train "))
    assert first.startswith("train --config ")
    resumed = ["train", "--resume", "runs/seven", *ON_CPUS, "output_dir=runs", "env.app=null"]
    assert second.split()[: len(resumed)] == resumed
    assert calls(folder).count("told") == 1


def test_a_node_that_is_given_up_leaves_nothing(folder: Path) -> None:
    with SlurmNode(require_slurm()) as node:
        submit(node, folder, "stay=yes")
        until_called(folder, "worker ")
        until_called(folder, "train ")
        started = node.processes()
        assert any("rl_bridge.services.worker" in process.cmdline() for process in started)
    _, left = psutil.wait_procs(started, timeout=20)
    assert left == []
