"""Two runs of one seed: one undisturbed, one whose trainer is killed, and which is then killed whole and resumed."""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.job import Job
from rl_bridge.metrics.status import SERVING, StatusSnapshot

EVERY = 5
"""Iterations between checkpoints. Kills come in between."""
RUN_TIMEOUT_S = 600.0
LOOK_S = 0.1
COMPARED = ("loss/total", "train/grad_norm", "reward/mean")


@dataclass(frozen=True, slots=True)
class Comeback:
    """What a run looked like when it had come to its end.

    Attributes:
        figures: Of each iteration, those that are compared.
        weights: The trained policy's file.
        trained: Groups of the history that led to the final weights, in order.
        dropped: Groups that were given up in it.
        pending: Groups that were under way, or finished and not trained, when the checkpoint was written that it came
            back to.
    """

    figures: Sequence[tuple[float, ...]]
    weights: bytes
    trained: Sequence[int]
    dropped: Sequence[int]
    pending: Sequence[int]


def undisturbed(root: Path, folder: Path, iterations: int, *words: str) -> Comeback:
    """Run to the end.

    Raises:
        RuntimeError: It failed.
    """
    job = Job(root, folder, f"trainer.iterations={iterations}", *words)
    try:
        _require(job.wait(RUN_TIMEOUT_S) == 0, "expected the run to end well", job)
        return _looked_at(job, ())
    finally:
        job.close()


def killed(root: Path, folder: Path, iterations: int, seed: int, *words: str) -> Comeback:
    """Kill the trainer, then the run; resume it, to the end.

    Args:
        root: A checkout.
        folder: Where the run writes.
        iterations: Of the run; enough that it lasts longer than the kills.
        seed: Draws the iterations of the kills, and which rank of the trainer.
        words: Overrides.

    Raises:
        RuntimeError: Something was not as it has to be.
    """
    drawn = random.Random(seed)
    first = EVERY + drawn.randint(1, EVERY - 1)
    second = first + EVERY + (-first) % EVERY - drawn.randint(1, EVERY - 1)
    second = max(second, first + 1) + (max(second, first + 1) % EVERY == 0)
    job = Job(root, folder, f"trainer.iterations={iterations}", *words)
    try:
        status = reached(job, first)
        victims = [pid for one in _trainers(status) for pid in one.pids]
        os.kill(drawn.choice(victims), signal.SIGKILL)
        _until(
            job, lambda now: any(one.restarts for one in _trainers(now)), "the trainer to be started again"
        )
        reached(job, second)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        _require(not job.left_behind(), "expected nothing to outlive the run", job)
        pending = _pending_at_the_checkpoint(folder)
    finally:
        job.close()
    again = Job(root, folder, resume=True)
    try:
        _require(again.wait(RUN_TIMEOUT_S) == 0, "expected the resumed run to end well", again)
        return _looked_at(again, pending)
    finally:
        again.close()


def _trainers(status: StatusSnapshot) -> Sequence[Any]:
    return next((service.replicas for service in status.services if service.name == "trainer"), ())


def reached(job: Job, version: int) -> StatusSnapshot:
    """Wait until so many iterations are trained, and the trainer serves.

    Raises:
        RuntimeError: The run ended before, or it took too long.
    """

    def there(status: StatusSnapshot) -> bool:
        return status.version >= version and all(one.state == SERVING for one in _trainers(status))

    return _until(job, there, f"iteration {version}")


def _until(job: Job, condition: Any, what: str) -> StatusSnapshot:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline and job.process.poll() is None:
        status = job.status()
        if status is not None and condition(status):
            return status
        time.sleep(LOOK_S)
    raise RuntimeError(f"expected {what} before the run ended:\n{job.output()[-3000:]}")


def _require(condition: bool, what: str, job: Job) -> None:
    if not condition:
        raise RuntimeError(f"{what}:\n{job.output()[-3000:]}")


def _pending_at_the_checkpoint(folder: Path) -> list[int]:
    newest = max(
        (folder / "checkpoint").glob("step-*[0-9]"), key=lambda one: int(one.name.removeprefix("step-"))
    )
    ledger = json.loads((newest / "run.json").read_text())["run_state"]["ledger"]
    return [*ledger["finished"], *(group for group, *_ in ledger["waiting"])]


def _looked_at(job: Job, pending: Sequence[int]) -> Comeback:
    return Comeback(
        figures=[tuple(row[name] for name in COMPARED) for row in job.rows("metrics.jsonl")],
        weights=(job.folder / "policy" / "model.safetensors").read_bytes(),
        trained=job.trained(),
        dropped=[int(group) for row in job.rows("groups.jsonl") for group in row["dropped"]],
        pending=pending,
    )
