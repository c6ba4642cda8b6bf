"""Planted bugs are caught by their check alone, the good environment passes all; leaks are told from noise."""

import json
import random
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import gallery
import pytest
from module_run import finished

from openenv_core.checker.check import CheckLevel, select_checks
from openenv_core.checker.load import Growth, leaks_memory, leaks_resources
from openenv_core.checker.results import BAD, Status, run_check
from openenv_core.checker.subject import Subject

ROOT = Path(__file__).parents[2]
BUGS = gallery.BUGS
GOOD = "good"
QUICK = ("same_seed_same_episode", "reset_forgets", "different_seeds_differ", "rewards_valid")
ENDED_S = 300.0

Verdict = dict[str, tuple[str, str]]


def run_all_checks(folder: Path, step_timeout_s: float) -> Verdict:
    """Run every check on an environment, in a process of its own."""
    words = [sys.executable, str(gallery.HERE / "judge.py"), str(folder), str(step_timeout_s)]
    done = finished(*words, cwd=ROOT, timeout_s=ENDED_S)
    assert done.returncode == 0, done.stderr
    return {name: (status, message) for name, (status, message) in json.loads(done.stdout).items()}


def checks_with(verdict: Verdict, *statuses: Status) -> set[str]:
    return {name for name, (status, _) in verdict.items() if status in statuses}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """What came of each environment. Two are looked at side by side, ahead of the tests that ask."""
    here = [item for item in request.session.items if item.path == request.path]
    wanted = [item.callspec.params["name"] for item in here if "verdicts" in item.fixturenames]
    folder, pool = tmp_path_factory.mktemp("gallery"), ThreadPoolExecutor(2)

    def submit(name: str) -> Future[Verdict]:
        bug = None if name == GOOD else gallery.bug(name)
        timeout_s = gallery.STEP_TIMEOUT_S if bug is None else bug.step_timeout_s
        return pool.submit(run_all_checks, gallery.build(folder, bug), timeout_s)

    yield {name: submit(name) for name in dict.fromkeys([GOOD, *wanted])}
    pool.shutdown(cancel_futures=True)


@pytest.mark.soak
@pytest.mark.timeout(ENDED_S)
@pytest.mark.parametrize("name", [GOOD, *(bug.name for bug in BUGS)])
def test_a_planted_bug_is_caught_by_its_check_alone(name: str, verdicts: dict[str, Future[Verdict]]) -> None:
    good, verdict = verdicts[GOOD].result(), verdicts[name].result()
    bad = {check: verdict[check] for check in checks_with(verdict, *BAD)}
    skipped = checks_with(verdict, Status.SKIPPED)
    if name == GOOD:
        assert bad == {}
        assert all("tool" in check for check in skipped)  # it has none
    else:
        planted = gallery.bug(name)
        assert set(bad) == {planted.caught_by, *planted.also_caught_by}, bad
        assert bad[planted.caught_by][0] == Status.FAILED
        assert skipped - checks_with(good, Status.SKIPPED) <= planted.also_skipped


@pytest.mark.slow
@pytest.mark.parametrize("name", [GOOD, "unseeded", "reset_keeps"])
def test_bugs_of_the_seed_are_caught_in_this_process(name: str, tmp_path: Path) -> None:
    bug = None if name == GOOD else gallery.bug(name)
    with Subject.of(gallery.build(tmp_path, bug)) as subject:
        results = [run_check(subject, check) for check in select_checks(names=QUICK)]
    expected = set() if bug is None else {bug.caught_by}
    assert {one.check for one in results if one.status in BAD} == expected


@pytest.mark.soak
@pytest.mark.timeout(ENDED_S)
@pytest.mark.parametrize("name", [GOOD, "unseeded", "global_generator"])
def test_planted_bug_is_caught_at_a_url(name: str, tmp_path: Path) -> None:
    bug = None if name == GOOD else gallery.bug(name)
    folder = gallery.build(tmp_path, bug)
    levels = [CheckLevel.SEMANTIC, CheckLevel.LOAD]
    with Subject.of(folder) as server, Subject.of(server.url, sessions=12, fuzz=30) as subject:
        results = [run_check(subject, check) for check in select_checks(levels)]
    expected = set() if bug is None else {bug.caught_by, *bug.also_caught_by}
    assert {one.check: one.message for one in results if one.status in BAD}.keys() == expected
    assert sum(one.status is Status.PASSED for one in results) >= 2


# ---- growth

MIB = 1 << 20
PAGE = 4096


def test_a_kilobyte_an_episode_is_a_leak_also_through_noise() -> None:
    windows = tuple(50 * MIB + window * 100 * 1024 for window in range(7))
    found = Growth(windows, 100)
    assert leaks_memory(found)
    assert round(found.slope) == 1024
    noise = random.Random(1)
    noisy = tuple(value + noise.randrange(-5, 6) * PAGE for value in windows)
    assert leaks_memory(Growth(noisy, 100))


NO_LEAKS = (
    (50 * MIB, 50 * MIB, 50 * MIB, 58 * MIB, 58 * MIB, 58 * MIB, 58 * MIB),  # one jump
    (50 * MIB, 54 * MIB, 55 * MIB, 55 * MIB, 55 * MIB, 55 * MIB, 55 * MIB),  # a cache that has filled
    (50 * MIB, 51 * MIB, 50 * MIB, 51 * MIB, 50 * MIB, 51 * MIB, 50 * MIB),  # garbage that comes and goes
    tuple((57 - window) * MIB for window in range(7)),
    tuple(50 * MIB + window * PAGE for window in range(7)),
)


def test_growth_that_does_not_go_on_is_no_leak() -> None:
    for values in NO_LEAKS:
        assert not leaks_memory(Growth(values, 100)), values
    for seed in range(200):  # pages that allocators take and give
        steps = random.Random(seed)
        walk = accumulate((steps.randrange(-3, 4) * PAGE for _ in range(6)), initial=50 * MIB)
        assert not leaks_memory(Growth(tuple(walk), 100))


def test_threads_and_files_leak_by_few() -> None:
    assert leaks_resources(Growth((10, 10, 11, 11, 12, 12, 13), 100))
    assert not leaks_resources(Growth((10, 12, 10, 11, 10, 12, 10), 100))
    assert not leaks_resources(Growth((10, 10, 10, 10, 10, 10, 14), 100))  # the last sessions still closing
    assert not leaks_resources(Growth((10, 11, 12, 12, 12, 12, 12), 100))  # a pool that has filled
