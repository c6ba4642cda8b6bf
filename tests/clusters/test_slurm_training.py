"""BlackJack under a real Slurm of one node: trained, interrupted when its time is over, queued up again, finished."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from free_ports import free_ports
from slurm_node import SlurmNode, require_slurm

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(900)]

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
START_S = 300


def iterations(folder: Path) -> list[int]:
    metrics = folder / "runs/toy/metrics.jsonl"
    if not metrics.exists():
        return []
    return [json.loads(line)["iteration"] for line in metrics.read_text().splitlines() if line.endswith("}")]


def test_a_job_trains_and_goes_on_where_its_time_was_over(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The script takes the two ports that follow as well.
    port = free_ports(3)[0]
    variables = f"ALL,ROPEWALK_VENV={sys.prefix},PYTHONPATH={path},RUN=toy,MONARCH_PORT={port}"
    script = str(ROOT / "examples/grpo_blackjack/slurm/train.sbatch")
    with SlurmNode(require_slurm()) as slurm:
        options = [f"--chdir={tmp_path}", f"--export={variables}", "--output=job.log", "--cpus-per-task=2"]
        job = slurm.run("sbatch", "--parsable", *options, script, *TOY).strip()
        log = tmp_path / "job.log"
        deadline = time.monotonic() + START_S
        while not iterations(tmp_path):
            log_tail = log.read_text()[-3000:] if log.exists() else ""
            assert slurm.state(job) in {"PENDING", "RUNNING"}, log_tail
            assert time.monotonic() < deadline, log_tail
            time.sleep(0.2)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        slurm.wait(job, "PENDING", timeout_s=120)
        # Slurm itself would wait for two minutes: the end of what is requeued is not to be taken for the next one's.
        slurm.wait_idle(timeout_s=120)
        before = iterations(tmp_path)
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        ended = slurm.wait(job, "COMPLETED", "FAILED", timeout_s=START_S)
        assert ended == "COMPLETED", log.read_text()[-3000:] + slurm.logs()
    assert 1 <= len(before) < ITERATIONS
    assert re.search(r"go on after iteration \d+ with: ropewalk train --resume runs/toy", log.read_text())
    assert iterations(tmp_path) == list(range(1, ITERATIONS + 1))
    assert json.loads((tmp_path / "runs/toy/report.json").read_text())["hands"] == 64
