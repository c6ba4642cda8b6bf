"""Tests in several processes: isolation of the workers, and groups of tests that stay in one worker."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

MOST_WORKERS = 8
"""More workers would run out of memory."""

ENGINE = "engine"
CLUSTERS = "tests/clusters"
LONGEST = (
    ENGINE,
    "tests/e2e/test_learning.py",
    "tests/faults/test_kills.py",
    "tests/examples/sft/test_recipes_train.py",
    "tests/e2e/test_train_command.py",
)
"""Groups that start first, so that they do not run alone at the end."""

OWN_PROCESS = "ROPEWALK_TEST_OWN_PROCESS"
OWN_PROCESS_TIMEOUT_S = 200

_ROOT = Path(__file__).parents[2]
_MARKED = re.compile(r"\bmark\.docker\b")


def workers(selection: str) -> int:
    """Return the number of workers for `-n auto`: light tests wait half of the time, heavy ones use several cores.

    Args:
        selection: The marker expression.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, 2 * cores) if "not heavy" in selection else min(MOST_WORKERS // 2, cores)


def own_scratch() -> Path | None:
    """Create a worker's own folder for temporary files, since tests inspect leftovers; returns the folder."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        return None
    # A short name, because of the length limit of socket paths.
    folder = Path(tempfile.mkdtemp(prefix=f"{worker}-"))
    # As open as its parent: code in a sandbox runs as another user.
    folder.chmod(0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


def remove_scratch(folder: Path | None) -> None:
    """Remove the folder of `own_scratch`."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def run_in_own_process(item: pytest.Item) -> bool | None:
    """Run a test marked `own_process` in a separate pytest process, which it may interrupt.

    Returns:
        True if the test was run; None if pytest should run it, because it is unmarked or already in that process.
    """
    if item.get_closest_marker("own_process") is None or OWN_PROCESS in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", item.nodeid]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=item.config.rootpath,
        env={**environment, OWN_PROCESS: "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=OWN_PROCESS_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(
            f"status {done.returncode} in a process of its own:\n{done.stdout}{done.stderr}", pytrace=False
        )
    return True


def printable(told: object) -> object:
    """Return a worker's report with lone surrogates escaped, which cannot be sent."""
    if isinstance(told, str):
        return told.encode(errors="backslashreplace").decode()
    if isinstance(told, dict):
        return {printable(key): printable(value) for key, value in told.items()}
    # The location and reason of a skip must stay a tuple, or pytest's summary aborts the run.
    return type(told)(printable(each) for each in told) if type(told) in (list, tuple) else told


def longest_first(items: list[pytest.Item]) -> None:
    """Move the tests of LONGEST to the front; the order of the rest is kept."""
    order = {group: position for position, group in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


def group_of(test: str) -> str:
    """Return the group of a test, which one worker runs as a whole: the test's file, or several files.

    All tests that use the one Docker engine are a group, since they start, stop and inspect it. So are the tests of
    clusters, whose scripts and manifests use fixed ports.

    Args:
        test: The test's id, which begins with the file's path.
    """
    return _group_of_file(test.partition("::")[0])


@functools.cache
def _group_of_file(file: str) -> str:
    if _MARKED.search((_ROOT / file).read_text(encoding="utf-8")):
        return ENGINE
    return CLUSTERS if file.startswith(f"{CLUSTERS}/") else file


class Groups(LoadScopeScheduling):
    """Hands groups to workers in the order of collection.

    pytest-xdist's own groups are markers that it appends to test ids, which pytest 9.2 no longer supports.
    """

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
