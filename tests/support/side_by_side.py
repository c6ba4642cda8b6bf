"""Tests that run in several processes side by side: what each has to itself, and which stay together."""

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
"""More would run out of memory before they ran out of cores."""

ENGINE = "engine"
CLUSTERS = "tests/clusters"
LONGEST = (
    ENGINE,
    "tests/e2e/test_learning.py",
    "tests/faults/test_kills.py",
    "tests/examples/sft/test_recipes_train.py",
    "tests/e2e/test_train_command.py",
)
"""What begins first, so that it does not go on alone when all else has ended."""

OWN_PROCESS = "ROPEWALK_TEST_OWN_PROCESS"
OWN_PROCESS_TIMEOUT_S = 200

_ROOT = Path(__file__).parents[2]
_MARKED = re.compile(r"\bmark\.docker\b")


def workers(selection: str) -> int:
    """How many `-n auto` stands for: light tests wait half of their time, and a heavy one keeps several cores busy.

    Args:
        selection: The expression of markers.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, 2 * cores) if "not heavy" in selection else min(MOST_WORKERS // 2, cores)


def own_scratch() -> Path | None:
    """Give a worker a folder for temporary files, since tests look at what is left in it; returns the folder."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        return None
    # A short name, for the sockets that are made below it.
    folder = Path(tempfile.mkdtemp(prefix=f"{worker}-"))
    # As open as its parent: code in a sandbox runs as somebody else.
    folder.chmod(0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


def remove_scratch(folder: Path | None) -> None:
    """Remove what `own_scratch` made."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def run_in_own_process(item: pytest.Item) -> bool | None:
    """Run a test marked `own_process` by a pytest of its own, which it may interrupt.

    Returns:
        Whether the test was run: None where pytest is to run it as any other, since it is in that process already.
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
    """What a worker tells of a test, without the halves of characters that cannot be sent."""
    if isinstance(told, str):
        return told.encode(errors="backslashreplace").decode()
    if isinstance(told, dict):
        return {printable(key): printable(value) for key, value in told.items()}
    # A skip's place and reason stay a tuple: pytest's summary takes nothing else, and ends the whole run otherwise.
    return type(told)(printable(each) for each in told) if type(told) in (list, tuple) else told


def longest_first(items: list[pytest.Item]) -> None:
    """Put what takes longest before all else; the rest stays as it is."""
    order = {group: position for position, group in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


def group_of(test: str) -> str:
    """The name of what one worker runs as a whole: the test's file, or more.

    There is one Docker engine, which tests start, stop and look at as a whole: all that use it are one group. So are
    those of clusters, whose scripts and manifests name ports.

    Args:
        test: Its id, which begins with the file's path.
    """
    return _group_of_file(test.partition("::")[0])


@functools.cache
def _group_of_file(file: str) -> str:
    if _MARKED.search((_ROOT / file).read_text(encoding="utf-8")):
        return ENGINE
    return CLUSTERS if file.startswith(f"{CLUSTERS}/") else file


class Groups(LoadScopeScheduling):
    """Hands groups to workers, in the order in which they were collected.

    pytest-xdist's own groups are marks that it writes into the tests' ids, where pytest 9.2 no longer looks.
    """

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
