"""Two runs of one seed: one undisturbed; in the other the trainer is killed, then the whole run, which is resumed."""

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

CHECKPOINT_INTERVAL = 5
"""Iterations between checkpoints. Kills come in between."""
RUN_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.1
COMPARED_METRICS = ("loss/total", "train/grad_norm", "reward/mean")


@dataclass(frozen=True, slots=True)
class EndState:
    """The end state of a run.

    Attributes:
        metrics: The `COMPARED_METRICS` of each iteration.
        weights: Content of the trained policy's file.
        trained: Groups of the history that led to the final weights, in order.
        dropped: Groups of that history that were dropped.
        pending: Groups in progress, or finished but not trained, when the checkpoint was written that the run resumed
            from.
    """

    metrics: Sequence[tuple[float, ...]]
    weights: bytes
    trained: Sequence[int]
    dropped: Sequence[int]
    pending: Sequence[int]


def run_undisturbed(root: Path, folder: Path, iterations: int, *overrides: str) -> EndState:
    """Run to the end.

    Raises:
        RuntimeError: The run failed.
    """
    job = Job(root, folder, f"trainer.iterations={iterations}", *overrides)
    try:
        _require(job.wait(RUN_TIMEOUT_S) == 0, "expected the run to end well", job)
        return _collect(job, ())
    finally:
        job.close()


def run_killed(root: Path, folder: Path, iterations: int, seed: int, *overrides: str) -> EndState:
    """Kill the trainer, then the run; resume the run to its end.

    Args:
        root: A checkout.
        folder: Where the run writes.
        iterations: Iterations of the run; enough that it outlasts the kills.
        seed: Seed of the iterations of the kills, and of the trainer's rank.
        overrides: Configuration overrides.

    Raises:
        RuntimeError: A step of the run did not go as expected.
    """
    rng = random.Random(seed)
    first = CHECKPOINT_INTERVAL + rng.randint(1, CHECKPOINT_INTERVAL - 1)
    second = (
        first + CHECKPOINT_INTERVAL + (-first) % CHECKPOINT_INTERVAL - rng.randint(1, CHECKPOINT_INTERVAL - 1)
    )
    second = max(second, first + 1) + (max(second, first + 1) % CHECKPOINT_INTERVAL == 0)
    job = Job(root, folder, f"trainer.iterations={iterations}", *overrides)
    try:
        status = wait_for_iteration(job, first)
        victims = [pid for replica in _trainers(status) for pid in replica.pids]
        os.kill(rng.choice(victims), signal.SIGKILL)
        _wait_until(
            job,
            lambda now: any(replica.restarts for replica in _trainers(now)),
            "the trainer to be started again",
        )
        wait_for_iteration(job, second)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        _require(not job.find_leftovers(), "expected nothing to outlive the run", job)
        pending = _read_pending_groups(folder)
    finally:
        job.close()
    resumed = Job(root, folder, resume=True)
    try:
        _require(resumed.wait(RUN_TIMEOUT_S) == 0, "expected the resumed run to end well", resumed)
        return _collect(resumed, pending)
    finally:
        resumed.close()


def _trainers(status: StatusSnapshot) -> Sequence[Any]:
    return next((service.replicas for service in status.services if service.name == "trainer"), ())


def wait_for_iteration(job: Job, version: int) -> StatusSnapshot:
    """Wait until `version` iterations are trained and the trainer serves.

    Raises:
        RuntimeError: The run ended first, or the wait timed out.
    """

    def has_caught_up(status: StatusSnapshot) -> bool:
        return status.version >= version and all(replica.state == SERVING for replica in _trainers(status))

    return _wait_until(job, has_caught_up, f"iteration {version}")


def _wait_until(job: Job, condition: Any, expectation: str) -> StatusSnapshot:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline and job.process.poll() is None:
        status = job.status()
        if status is not None and condition(status):
            return status
        time.sleep(POLL_INTERVAL_S)
    raise RuntimeError(f"expected {expectation} before the run ended:\n{job.output()[-3000:]}")


def _require(condition: bool, message: str, job: Job) -> None:
    if not condition:
        raise RuntimeError(f"{message}:\n{job.output()[-3000:]}")


def _read_pending_groups(folder: Path) -> list[int]:
    newest = max(
        (folder / "checkpoint").glob("step-*[0-9]"), key=lambda path: int(path.name.removeprefix("step-"))
    )
    ledger = json.loads((newest / "run.json").read_text())["run_state"]["ledger"]
    return [*ledger["finished"], *(group for group, *_ in ledger["waiting"])]


def _collect(job: Job, pending: Sequence[int]) -> EndState:
    return EndState(
        metrics=[tuple(row[name] for name in COMPARED_METRICS) for row in job.rows("metrics.jsonl")],
        weights=(job.folder / "policy" / "model.safetensors").read_bytes(),
        trained=job.trained(),
        dropped=[int(group) for row in job.rows("groups.jsonl") for group in row["dropped"]],
        pending=pending,
    )
