"""Training runs whose processes are killed: they resume, train every group once, and leave nothing behind."""

import signal
from pathlib import Path

import pytest
from comeback import CHECKPOINT_INTERVAL, run_killed, run_undisturbed, wait_for_iteration

from benchmarks.faults.__main__ import BENCHMARK, GROUPS_AN_ITERATION, REWARD, record
from benchmarks.faults.job import Job
from benchmarks.faults.kills import KINDS, Killer
from benchmarks.harness import INTERRUPTED, Measurements
from rl_bridge.loops.run import HISTORY_FILE

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ITERATIONS_AFTERWARDS = 10
END_TIMEOUT_S = 300.0
SMALLER = ("rollout.batch_size=128", "env.sessions=32", "evaluation.episodes=16", "rollout.num_workers=1")


def test_each_kind_of_process_survives_a_kill(tmp_path: Path) -> None:
    job = Job(
        ROOT,
        tmp_path / "run",
        "trainer.iterations=5000",  # it may not end before the last one is back, and is interrupted then
        "rollout.max_staleness=1",
        REWARD,
    )
    try:
        killer = Killer(job, seed=3, pause_s=(0.2, 1.0))
        killer.all(KINDS)
        wait_for_iteration(job, killer.kills[-1].version + ITERATIONS_AFTERWARDS)
        job.process.send_signal(signal.SIGINT)
        assert job.wait(END_TIMEOUT_S) == INTERRUPTED, job.output()[-3000:]
        iterations = [row["iteration"] for row in job.rows(HISTORY_FILE)]
        measurements = Measurements()
        groups = iterations[-1] * GROUPS_AN_ITERATION
        record(killer, len(KINDS), groups, measurements, status=INTERRUPTED)
    finally:
        job.close()
    assert iterations == [*range(1, iterations[-1] + 1)]
    assert iterations[-1] > killer.kills[-1].version
    # How long a loss took is for the benchmark to say; here everything else has to hold.
    missed = [bar for bar in BENCHMARK.bars(measurements) if not bar.met and "slowest" not in bar.label]
    assert missed == [], job.output()[-3000:]
    assert all(kill.noticed_s is not None and kill.serving_s is not None for kill in killer.kills)


def test_deterministic_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    arguments = (
        *SMALLER,
        "deterministic=true",
        "monarch.roles.trainer.procs=2",
        "monarch.roles.policy.replicas=1",
    )
    iterations = 6 * CHECKPOINT_INTERVAL
    calm = run_undisturbed(ROOT, tmp_path / "calm", iterations, *arguments)
    back = run_killed(ROOT, tmp_path / "killed", iterations, 2, *arguments)
    assert len(calm.metrics) == iterations
    assert back.metrics == calm.metrics
    assert back.weights == calm.weights
    assert back.trained == calm.trained


def test_asynchronous_run_resumes_without_training_a_group_twice(tmp_path: Path) -> None:
    arguments = (*SMALLER, "rollout.max_staleness=2", "monarch.roles.policy.replicas=1")
    back = run_killed(ROOT, tmp_path / "killed", 6 * CHECKPOINT_INTERVAL, 5, *arguments)
    assert len(back.metrics) == 6 * CHECKPOINT_INTERVAL
    assert len(set(back.trained)) == len(back.trained) == 6 * CHECKPOINT_INTERVAL * 128 // 4
    # What was under way or finished when the checkpoint was written is not lost: trained, or given up for a reason.
    assert back.pending
    assert set(back.pending) <= set(back.trained) | set(back.dropped)
