"""The batch script of Slurm: with stand-ins for its commands, under a real Slurm of one node."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from module_run import finished
from namespaces import namespaces
from serve_process import eventually
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
    eventually(lambda: any(called.startswith(line) for called in calls(folder)))


def test_each_node_has_a_worker_known_to_the_controller(slurm: SlurmNode, folder: Path) -> None:
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


def test_tasks_of_an_array_join_a_run_again_when_they_are_requeued(slurm: SlurmNode, folder: Path) -> None:
    script = SCRIPT.with_name("join.sbatch")
    options = [f"--chdir={folder}", f"--export=ALL,ROPEWALK_VENV={folder}/venv", "--output=join-%a.log"]
    words = ["tcp://localhost:29502", "runs/seven"]
    job = slurm.run("sbatch", "--parsable", "--array=1-2", *options, str(script), *words).strip()
    joined = "worker -m rl_bridge.services.worker --join tcp://localhost:29502 --secret-file runs/seven/join.secret"
    eventually(lambda: calls(folder) == [joined, joined])
    # A notice, and a node that is taken away: the one ends, the other joins again.
    slurm.run("scancel", "--batch", "--signal=TERM", f"{job}_1")
    eventually(lambda: calls(folder).count("worker gone") == 1)
    slurm.run("scontrol", "requeue", f"{job}_2")
    eventually(lambda: calls(folder).count("worker gone") == 2)
    slurm.wait_idle(timeout_s=120)
    slurm.run("scontrol", "update", f"JobId={job}_2", "StartTime=now")
    eventually(lambda: calls(folder).count(joined) == 3)
    slurm.run("scancel", job)
    slurm.wait_idle(timeout_s=120)


def test_a_job_and_an_array_on_four_nodes_of_which_half_of_the_tasks_are_requeued(folder: Path) -> None:
    python = folder / "venv/bin/python"
    python.write_text(WORKER.replace("worker $*", "$SLURMD_NODENAME: worker $*"))
    with namespaces(4) as (controller, hosts), SlurmNode(require_slurm(), hosts, controller) as several:
        variables = f"ALL,ROPEWALK_VENV={folder}/venv,MONARCH_PORT=26700,RUN=seven"
        options = [f"--chdir={folder}", f"--export={variables}", "--cpus-per-task=1"]
        place = ["--nodelist=node1", "--output=job.log"]
        job = several.run("sbatch", "--parsable", *place, *options, str(SCRIPT), "stay=yes").strip()
        until_called(folder, "train ")
        place = ["--array=1-4", "--exclude=node1", "--output=join-%a.log"]
        words = [str(SCRIPT.with_name("join.sbatch")), "tcp://node1:29502", "runs/seven"]
        array = several.run("sbatch", "--parsable", *place, *options, *words).strip()

        def joined() -> list[str]:
            return [line.partition(":")[0] for line in calls(folder) if "--join tcp://node1:29502" in line]

        eventually(lambda: len(joined()) == 4)
        assert set(joined()) <= {"node2", "node3", "node4"}
        for task in (1, 3):
            several.run("scontrol", "requeue", f"{array}_{task}")
        for task in (1, 3):
            several.wait(f"{array}_{task}", "PENDING", timeout_s=120)
            several.run("scontrol", "update", f"JobId={array}_{task}", "StartTime=now")
        eventually(lambda: len(joined()) == 6, 180)
        assert [several.state(f"{array}_{task}") for task in (1, 2, 3, 4)] == ["RUNNING"] * 4
        assert several.state(job) == "RUNNING"
        several.run("scancel", array, job)
        several.wait_idle(timeout_s=120)
    assert "node1: worker -m rl_bridge.services.worker tcp://node1:26700" in calls(folder)
    (trained,) = (call for call in calls(folder) if call.startswith("train "))
    assert "monarch.workers=[tcp://node1:26700]" in trained


# ---- between a signal and the controller's end, with stand-ins for Slurm's commands

SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo localhost; else echo "$*" >> calls; fi
"""
SRUN = """#!/bin/bash
echo "srun for ${SRUN_CPUS_PER_TASK:-no} CPUs" >> calls
"""
# The script's shell is told while the controller ends.
SIGNALLED = """#!/bin/bash
echo "ropewalk $*" >> calls
trap '' TERM
kill -"$SIGNAL" $PPID
exit "${STATUS:-130}"
"""
# A shell that has been told takes longer over it than the controller does.
SLOW = """
kill() {
  builtin kill "$@" && sleep 0.15
}
"""


def run_script(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "slurm").mkdir(exist_ok=True)
    for name, text in (("slurm/scontrol", SCONTROL), ("slurm/srun", SRUN), ("ropewalk", SIGNALLED)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "slow").write_text(SLOW)
    environment = {
        "PATH": f"{folder}:{folder}/slurm:{os.environ['PATH']}",
        "BASH_ENV": str(folder / "slow"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "ROPEWALK_VENV": str(folder / "venv"),
    }
    return finished("bash", SCRIPT, cwd=folder, env={**environment, **variables}, timeout_s=60)


@pytest.mark.parametrize(
    ("signal", "ended", "status", "queued"),
    [
        ("USR1", 130, 0, True),
        ("USR1", 143, 0, True),  # it had not begun to heed signals
        ("USR1", 0, 0, False),  # it was done just then
        ("TERM", 130, 130, False),
        ("CONT", 3, 3, False),  # nobody told it
    ],
)
def test_exit_status_of_a_signalled_controller_decides_about_requeueing(
    tmp_path: Path, signal: str, ended: int, status: int, queued: bool
) -> None:
    done = run_script(tmp_path, SIGNAL=signal, STATUS=str(ended))
    assert done.returncode == status, done.stderr
    assert ("requeue 7" in (tmp_path / "calls").read_text()) == queued


def test_steps_have_the_job_s_cpus_and_jobs_on_a_node_have_ports_of_their_own(tmp_path: Path) -> None:
    for job, cpus in (("7", {"SLURM_CPUS_PER_TASK": "6"}), ("8", {}), ("123456789", {})):
        run_script(tmp_path, SIGNAL="TERM", SLURM_JOB_ID=job, **cpus)
    called = calls(tmp_path)
    steps = [line for line in called if line.startswith("srun")]
    assert steps == ["srun for 6 CPUs"] * 2 + ["srun for no CPUs"] * 4
    masters = [int(found) for line in called for found in re.findall(r"monarch\.master_port=(\d+)", line)]
    # A worker's port and the environment's lie around each.
    ports = [port + beside for port in masters for beside in (-1, 0, 1)]
    assert len(set(ports)) == 9
    assert all(1024 < port < 32768 for port in ports)  # what systems choose by themselves lies above


@pytest.mark.parametrize(("gpus", "made"), [("2", ".venvs/rl"), ("1", ".venvs/rl-cpu")])
def test_the_installation_is_the_one_for_the_devices(tmp_path: Path, gpus: str, made: str) -> None:
    for venv in (".venvs/rl", ".venvs/rl-cpu"):
        program = tmp_path / venv / "bin" / "ropewalk"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/bash\necho "{venv} $*" >> calls\n')
        program.chmod(0o755)
    run_script(tmp_path, ROPEWALK_VENV="", SLURM_GPUS_ON_NODE=gpus)
    (trained,) = (line for line in calls(tmp_path) if " train " in line)
    assert trained.split()[0] == made
    assert ("monarch.roles.trainer.gpus=1" in trained) == (made == ".venvs/rl")
    # Said either way: a run that is gone on with may have been told otherwise when it began.
    assert ("monarch.roles.trainer.gpus=0" in trained) == (made == ".venvs/rl-cpu")


def test_an_installation_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run_script(
        tmp_path, PATH=f"{tmp_path / 'slurm'}:/usr/bin:/bin", ROPEWALK_VENV=str(tmp_path / "nowhere")
    )
    assert done.returncode == 2
    assert f"installation in {tmp_path / 'nowhere'}, found none" in done.stderr
    assert not (tmp_path / "calls").exists()
