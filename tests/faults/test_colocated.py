"""A trainer and generators that take turns on one GPU: the run stays the same bit by bit, even after kills."""

import os
import signal
import time
from pathlib import Path

import pytest
from comeback import CHECKPOINT_INTERVAL, EndState, run_undisturbed, wait_for_iteration

from benchmarks.faults.job import Job
from rl_bridge.metrics.status import SERVING

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
WAIT_TIMEOUT_S = 300.0
ITERATIONS = 4 * CHECKPOINT_INTERVAL
WORDS = (
    "rollout.batch_size=128",
    "env.sessions=32",
    "evaluation.episodes=16",
    "rollout.num_workers=1",
    "monarch.roles.policy.replicas=1",
)
COLOCATED = (*WORDS, "monarch.colocate=true")


def holders(job: Job) -> dict[int, int]:
    """Return the processes that hold each GPU turn, by the sockets named after the turns."""
    with open("/proc/net/unix", encoding="ascii") as table:
        turns = {line.split()[6] for line in table if "@ropewalk-turn/" in line}
    pids = {}
    for process in job.find_processes():
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        pids[process.pid] = sum(f"socket:[{inode}]" in links for inode in turns)
    return {pid: count for pid, count in pids.items() if count}


def kill(job: Job, *services: str, in_turn_of: str) -> None:
    """Kill a replica of each service while a turn is held; return when they serve again."""

    def pids(name: str) -> list[int]:
        status = job.status()
        rows = [] if status is None else [one for one in status.services if one.name == name]
        return [
            pid
            for row in rows
            for replica in row.replicas
            if replica.state == SERVING
            for pid in replica.pids
        ]

    deadline = time.monotonic() + WAIT_TIMEOUT_S
    victims, owners = [pids(service)[:1] for service in services], pids(in_turn_of)
    while not (all(victims) and set(owners) & set(holders(job))):
        assert time.monotonic() < deadline, job.output()[-3000:]
        victims, owners = [pids(service)[:1] for service in services], owners or pids(in_turn_of)
    for (victim,) in victims:
        os.kill(victim, signal.SIGKILL)
    for service, (victim,) in zip(services, victims, strict=True):
        while not (now := pids(service)) or victim in now:
            assert time.monotonic() < deadline, job.output()[-3000:]
            assert job.process.poll() is None, job.output()[-3000:]
            time.sleep(0.1)


def ended(job: Job) -> EndState:
    assert job.wait(WAIT_TIMEOUT_S) == 0, job.output()[-3000:]
    assert job.find_leftovers() == []
    return EndState(
        metrics=[(row["loss/total"], row["reward/mean"]) for row in job.rows("metrics.jsonl")],
        weights=(job.folder / "policy" / "model.safetensors").read_bytes(),
        trained=job.trained(),
        dropped=[int(group) for row in job.rows("groups.jsonl") for group in row["dropped"]],
        pending=(),
    )


def test_colocated_run_equals_the_separate_one_bit_by_bit_even_after_kills(tmp_path: Path) -> None:
    apart = run_undisturbed(ROOT, tmp_path / "apart", ITERATIONS, *WORDS, "deterministic=true")
    arguments = (*COLOCATED, "deterministic=true", f"trainer.iterations={ITERATIONS}")
    job = Job(ROOT, tmp_path / "killed", *arguments)
    try:
        wait_for_iteration(job, 2)
        kill(job, "policy", in_turn_of="trainer")
        kill(job, "trainer", in_turn_of="trainer")
        kill(job, "policy", in_turn_of="policy")
        kill(job, "trainer", in_turn_of="policy")
        kill(job, "policy", "trainer", in_turn_of="policy")
        kill(job, "policy", "trainer", in_turn_of="trainer")
        killed = ended(job)
    finally:
        job.close()
    assert killed.weights == apart.weights
    assert killed.trained == apart.trained
    assert [loss for loss, _ in killed.metrics] == [row[0] for row in apart.metrics]


def test_rollouts_running_at_the_switch_are_neither_lost_nor_trained_twice(tmp_path: Path) -> None:
    more = (
        *("rollout.max_staleness=1", "rollout.weight_update=continue", f"trainer.iterations={ITERATIONS}"),
        "generator.engine=vllm_async",  # in a process of its own, as on a GPU
    )
    job = Job(ROOT, tmp_path / "run", *COLOCATED, *more)
    try:
        wait_for_iteration(job, 2)
        kill(job, "policy", in_turn_of="trainer")
        kill(job, "trainer", in_turn_of="policy")
        run = ended(job)
        rows = job.rows("metrics.jsonl")
    finally:
        job.close()
    assert len(set(run.trained)) == len(run.trained) == ITERATIONS * 128 // 4
    assert set(run.trained) | set(run.dropped) == set(range(len(run.trained) + len(run.dropped)))
    assert sum(row["rollout/staleness/1"] for row in rows if "rollout/staleness/1" in row) > 0


def test_trainer_and_generator_never_hold_the_gpu_together(tmp_path: Path) -> None:
    """With two ranks and two generators, one process at a time holds each GPU."""
    arguments = (
        *WORDS[:-1],
        "monarch.colocate=true",
        "monarch.roles.trainer={procs: 2}",
        "trainer.iterations=6",
    )
    job = Job(ROOT, tmp_path / "run", *arguments)
    samples: list[dict[int, int]] = []
    try:
        wait_for_iteration(job, 1)
        while job.process.poll() is None:
            samples.append(holders(job))
            time.sleep(0.02)
        ended(job)
    finally:
        job.close()
    assert max(sum(one.values()) for one in samples) == 2
