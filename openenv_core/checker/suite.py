"""The checks as pytest functions: what `ropewalk validate` runs, and what an environment's own tests can have.

    from pathlib import Path

    from openenv_core.checker.suite import *

    subject = environment_subject(Path(__file__).parents[1])

gives one test a check, called after it. A check that has nothing to look at is skipped.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from openenv_core.checker.check import Check, CheckLevel, checks
from openenv_core.checker.results import BAD, Result, Status, run_check
from openenv_core.checker.subject import Subject

__all__ = ["environment_subject"]

RESULT: Final = pytest.StashKey[Result]()
"""Where a test that has run has what came of its check."""


def environment_subject(
    target: str | Path, *, levels: Iterable[str] = (), skip: Iterable[str] = (), **limits: Any
) -> Any:
    """Return the fixture `subject`: one environment under test, for all tests of a file.

    Args:
        target: What `ropewalk validate` takes; most often the environment's folder.
        levels: The levels to look at; all by default. The others' tests are skipped.
        skip: Names of checks whose tests are skipped too.
        limits: Fields of `openenv_core.checker.subject.CheckLimits`, such as `episodes=100`.

    Raises:
        ValueError: There is no such level or check.
    """
    wanted_levels = frozenset(CheckLevel(level) for level in levels) or frozenset(CheckLevel)
    without = frozenset(name.replace("-", "_") for name in skip)
    if unknown := without - {check.name for check in checks()}:
        raise ValueError(f"expected names of checks to skip, got {', '.join(sorted(unknown))}")

    @pytest.fixture(scope="module", name="subject")
    def subject() -> Iterator[Subject]:
        with Subject.of(target, **limits) as checked:
            checked.left_out = frozenset(
                check.name for check in checks() if check.level not in wanted_levels or check.name in without
            )
            yield checked

    return subject


def _test_of(check: Check) -> Callable[[Subject, pytest.FixtureRequest], None]:
    def test(subject: Subject, request: pytest.FixtureRequest) -> None:
        if check.name in subject.left_out:
            pytest.skip("left out by environment_subject")
        result = request.node.stash[RESULT] = run_check(subject, check)
        if result.status is Status.SKIPPED:
            pytest.skip(result.message)
        if result.status in BAD:
            pytest.fail(
                f"{result.says}\n{result.status}: {result.message}\nchange: {result.change}", pytrace=False
            )
        if result.status is Status.WARNED:
            warnings.warn(f"{result.message}; {result.change}", stacklevel=1)

    test.__name__ = test.__qualname__ = f"test_{check.name}"
    test.__doc__ = check.says
    return test


for _check in checks():
    globals()[f"test_{_check.name}"] = _test_of(_check)
    __all__ += [f"test_{_check.name}"]
