"""The checks of `ropewalk validate` as pytest functions, also for an environment's own tests.

    from pathlib import Path

    from openenv_core.checker.suite import *

    subject = environment_subject(Path(__file__).parents[1])

defines a test per check, named after it. A check that does not apply to the target is skipped.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv_core.checker.check import Check, CheckLevel, checks
from openenv_core.checker.results import BAD, Status, run_check
from openenv_core.checker.subject import Subject

__all__ = ["environment_subject"]


def environment_subject(
    target: str | Path, *, levels: Iterable[str] = (), skip: Iterable[str] = (), **limits: Any
) -> Any:
    """Return the fixture `subject`: the environment under test, for all tests of a module.

    Args:
        target: A target of `ropewalk validate`, usually the environment's folder.
        levels: Levels to check; all by default. Tests of other levels are skipped.
        skip: Names of checks to skip as well.
        limits: Fields of `openenv_core.checker.subject.CheckLimits`, such as `episodes=100`.

    Raises:
        ValueError: A level or a check does not exist.
    """
    wanted_levels = frozenset(CheckLevel(level) for level in levels) or frozenset(CheckLevel)
    skipped_names = frozenset(name.replace("-", "_") for name in skip)
    if unknown := skipped_names - {check.name for check in checks()}:
        raise ValueError(f"expected names of checks to skip, got {', '.join(sorted(unknown))}")

    @pytest.fixture(scope="module", name="subject")
    def subject() -> Iterator[Subject]:
        with Subject.of(target, **limits) as checked:
            checked.left_out = frozenset(
                check.name
                for check in checks()
                if check.level not in wanted_levels or check.name in skipped_names
            )
            yield checked

    return subject


def _test_of(check: Check) -> Callable[[Subject], None]:
    def test(subject: Subject) -> None:
        if check.name in subject.left_out:
            pytest.skip("left out by environment_subject")
        result = run_check(subject, check)
        if result.status is Status.SKIPPED:
            pytest.skip(result.message)
        if result.status in BAD:
            pytest.fail(
                f"{result.description}\n{result.status}: {result.message}\nchange: {result.change}",
                pytrace=False,
            )
        if result.status is Status.WARNED:
            warnings.warn(f"{result.message}; {result.change}", stacklevel=1)

    test.__name__ = test.__qualname__ = f"test_{check.name}"
    test.__doc__ = check.description
    return test


for _check in checks():
    globals()[f"test_{_check.name}"] = _test_of(_check)
    __all__ += [f"test_{_check.name}"]
