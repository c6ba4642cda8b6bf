"""What all tests share: what is importable, who runs without the heavy stack, what its libraries may warn of."""

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

gc.disable()  # until all is collected: modules and tests are no garbage

# `tests/servers` and its neighbours must not be taken for the packages whose names they mirror, so the
# repository comes first; `support` holds the environments that tests serve.
sys.path[:0] = [str(_HERE.parent), str(_HERE / "support")]

fuzzing = importlib.import_module("fuzzing")
released = importlib.import_module("released")
side_by_side = importlib.import_module("side_by_side")

_SCRATCH = side_by_side.own_scratch()

# A shell starts background jobs with Ctrl-C ignored, nohup with the hang-up ignored, and every descendant inherits
# that; tests that signal what they start, or themselves, must not depend on how they were started.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes is a matter of what else the machine does; pytest's own time-out is for what hangs.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("quick", deadline=None, max_examples=40, derandomize=True, database=None)
    settings.register_profile("long", deadline=None, max_examples=20 * fuzzing.EXAMPLES)
    settings.load_profile("long" if fuzzing.LONG else "quick")

COMPANION_S = 30.0

HEAVY_STACK = ("monarch", "tokenizers", "torchtitan", "transformers", "vllm")

# The heavy libraries warn of each other's and of their own age, on every import. Our code is not exempt:
# what it raises or warns of itself is neither of these categories.
TOLERATED_OF_HEAVY = (
    "default::DeprecationWarning",
    "default::FutureWarning",
    "default::PendingDeprecationWarning",
    "default::ImportWarning",
    "default::UserWarning",
    "default::ResourceWarning",
    "default::pytest.PytestUnraisableExceptionWarning",
)


OTHER_TIER = re.compile(r"^pytestmark = [^\n]*\bmark\.(slow|heavy|docker|interop|soak)\b", re.MULTILINE)
"""A file's own marks, where they are on one line; a file that is missed so is imported in vain, and no more."""


class LightPathFinder(PathFinder):
    """Finds what the profile `test` holds: where the heavy stack is, the first tier does without it all the same."""

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
    """Whether a file is not even imported, which each worker would do: as a whole it is marked for another tier."""
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
    gc.freeze()  # or each search for garbage, in every process, goes through all modules and tests again
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
    """End what watches over containers, which lasts as long as its owner: later tests look at all children."""
    yield
    if (module := sys.modules.get("openenv_core.providers.docker.companion")) is None:
        return
    while module._companions:
        _, companion = module._companions.popitem()
        companion.close(COMPANION_S)
        companion._process.wait(COMPANION_S)
