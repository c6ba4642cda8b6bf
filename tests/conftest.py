"""Hooks for all tests: import paths, tiers, hiding of the heavy stack, tolerated warnings, isolation of workers."""

import gc
import importlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent

# Tests start hundreds of processes, and each worker imports all tests: they share what is compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()  # until all tests are collected: modules and tests are no garbage

# `tests/servers` and its neighbours must not shadow the packages whose names they mirror, so the repository comes
# first; `support` has the environments and servers that tests share.
sys.path[:0] = [str(_HERE.parent), str(_HERE / "support")]

fuzzing = importlib.import_module("fuzzing")
released = importlib.import_module("released")
side_by_side = importlib.import_module("side_by_side")

_SCRATCH = side_by_side.own_scratch()

# Shells start background jobs with SIGINT ignored, nohup with SIGHUP ignored, and descendants inherit that. Tests that
# send signals must not depend on how pytest was started.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadline per example, as its duration depends on the machine's load; pytest's timeout catches hangs.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("quick", deadline=None, max_examples=40, derandomize=True, database=None)
    settings.register_profile("long", deadline=None, max_examples=20 * fuzzing.EXAMPLES)
    settings.load_profile("long" if fuzzing.LONG else "quick")

COMPANION_S = 30.0

HEAVY_STACK = ("monarch", "tokenizers", "torchtitan", "transformers", "vllm")

# The heavy libraries warn about each other and themselves on every import. Our code is not exempt by this: its own
# warnings have none of these categories.
TOLERATED_OF_HEAVY = (
    "default::DeprecationWarning",
    "default::FutureWarning",
    "default::PendingDeprecationWarning",
    "default::ImportWarning",
    "default::UserWarning",
    "default::ResourceWarning",
    "default::pytest.PytestUnraisableExceptionWarning",
)


OTHER_TIER = re.compile(r"^pytestmark = \[?\s*[^\n]*\bmark\.(slow|heavy|docker|interop|soak)\b", re.MULTILINE)
"""Marks of a whole file, its tier first. A file whose marks are not recognised is imported needlessly, nothing else."""


class LightPathFinder(PathFinder):
    """Hides the heavy stack where it is installed, so that the first tier never depends on it."""

    @classmethod
    def find_spec(cls, fullname: str, *args: Any) -> ModuleSpec | None:
        if fullname.partition(".")[0] in HEAVY_STACK:
            return None
        return super().find_spec(fullname, *args)


def is_first_tier(config: pytest.Config) -> bool:
    return "not heavy" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    if is_first_tier(config) and PathFinder in sys.meta_path:
        sys.meta_path[sys.meta_path.index(PathFinder)] = LightPathFinder


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files that are marked as a whole for another tier; each worker would import them."""
    if not is_first_tier(config) or collection_path.suffix != ".py":
        return None
    return True if OTHER_TIER.search(collection_path.read_text(encoding="utf-8")) else None


def missing_stack() -> list[str]:
    return [name for name in HEAVY_STACK if importlib.util.find_spec(name) is None]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return side_by_side.workers(config.option.markexpr)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    return side_by_side.printable((yield))


def pytest_unconfigure() -> None:
    side_by_side.remove_scratch(_SCRATCH)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return side_by_side.Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    side_by_side.longest_first(items)
    for item in items:
        if item.get_closest_marker("heavy") is not None:
            for tolerated in TOLERATED_OF_HEAVY:
                item.add_marker(pytest.mark.filterwarnings(tolerated), append=False)


def pytest_collection_finish() -> None:
    gc.freeze()  # so that collections in every process do not scan all modules and tests
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Item) -> bool | None:
    return side_by_side.run_in_own_process(pyfuncitem)


def pytest_runtest_setup(item: pytest.Item) -> None:
    message = None
    if item.get_closest_marker("heavy") is not None and (absent := missing_stack()):
        message = (
            f"needs {', '.join(absent)}, which the quick suite does without; "
            "get them with ./scripts/test --all, or install ropewalk[rl-cpu]"
        )
    if item.get_closest_marker("interop") is not None and (absent := released.missing()):
        message = f"needs the virtual environments {', '.join(absent)}; {released.HOW_TO}"
    if message is None:
        return
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="module", autouse=True)
def no_companion_stays() -> Iterator[None]:
    """End the companion of containers, which lives as long as its owner: later tests inspect all child processes."""
    yield
    if (module := sys.modules.get("openenv_core.providers.docker.companion")) is None:
        return
    while module._companions:
        _, companion = module._companions.popitem()
        companion.close(COMPANION_S)
        companion._process.wait(COMPANION_S)
