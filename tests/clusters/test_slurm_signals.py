"""The batch script between a signal and the controller's end, with stand-ins for Slurm's commands."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

SCRIPT = Path(__file__).parents[2] / "examples/grpo_blackjack/slurm/train.sbatch"
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo localhost; else echo "$*" >> calls; fi
"""
SRUN = """#!/bin/bash
echo "srun for ${SRUN_CPUS_PER_TASK:-no} CPUs" >> calls
"""
# The script's shell is told while the controller ends.
ROPEWALK = """#!/bin/bash
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


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "slurm").mkdir(exist_ok=True)
    for name, text in (("slurm/scontrol", SCONTROL), ("slurm/srun", SRUN), ("ropewalk", ROPEWALK)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "slow").write_text(SLOW)
    given = {
        "PATH": f"{folder}:{folder}/slurm:{os.environ['PATH']}",
        "BASH_ENV": str(folder / "slow"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "ROPEWALK_VENV": str(folder / "venv"),
    }
    return subprocess.run(
        ["bash", SCRIPT],
        cwd=folder,
        env={**given, **variables},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(
    ("signal", "ended", "status", "queued"),
    [
        ("USR1", 130, 0, True),
        ("USR1", 143, 0, True),  # it had not begun to heed signals
        ("USR1", 0, 0, False),  # it was done just then
        ("TERM", 130, 130, False),
    ],
)
def test_a_controller_that_ends_while_it_is_told_is_asked_for_its_status(
    tmp_path: Path, signal: str, ended: int, status: int, queued: bool
) -> None:
    done = run(tmp_path, SIGNAL=signal, STATUS=str(ended))
    assert done.returncode == status, done.stderr
    assert ("requeue 7" in (tmp_path / "calls").read_text()) == queued


@pytest.mark.parametrize(("given", "got"), [({"SLURM_CPUS_PER_TASK": "6"}, "6"), ({}, "no")])
def test_every_step_has_the_cpus_of_the_job(tmp_path: Path, given: dict[str, str], got: str) -> None:
    run(tmp_path, SIGNAL="TERM", **given)
    steps = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("srun")]
    assert steps == [f"srun for {got} CPUs"] * 2


def test_jobs_that_meet_on_a_node_have_ports_of_their_own(tmp_path: Path) -> None:
    for job in ("7", "8", "123456789"):
        run(tmp_path, SIGNAL="TERM", SLURM_JOB_ID=job)
    trained = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("ropewalk ")]
    masters = [int(re.findall(r"monarch\.master_port=(\d+)", words)[0]) for words in trained]
    # A worker's port and the environment's lie around each.
    taken = [port + beside for port in masters for beside in (-1, 0, 1)]
    assert len(set(taken)) == 9
    assert all(1024 < port < 32768 for port in taken)  # what systems choose by themselves lies above


@pytest.mark.parametrize(("gpus", "made"), [("2", ".venvs/rl"), ("1", ".venvs/rl-cpu")])
def test_the_installation_is_the_one_for_the_devices(tmp_path: Path, gpus: str, made: str) -> None:
    for venv in (".venvs/rl", ".venvs/rl-cpu"):
        program = tmp_path / venv / "bin" / "ropewalk"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/bash\necho "{venv} $*" >> calls\n')
        program.chmod(0o755)
    run(tmp_path, ROPEWALK_VENV="", SLURM_GPUS_ON_NODE=gpus)
    (trained,) = (line for line in (tmp_path / "calls").read_text().splitlines() if " train " in line)
    assert trained.split()[0] == made
    assert ("monarch.roles.trainer.gpus=1" in trained) == (made == ".venvs/rl")
    # Said either way: a run that is gone on with may have been told otherwise when it began.
    assert ("monarch.roles.trainer.gpus=0" in trained) == (made == ".venvs/rl-cpu")


def test_an_installation_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, PATH=f"{tmp_path / 'slurm'}:/usr/bin:/bin", ROPEWALK_VENV=str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert f"installation in {tmp_path / 'nowhere'}, found none" in done.stderr
    assert not (tmp_path / "calls").exists()
