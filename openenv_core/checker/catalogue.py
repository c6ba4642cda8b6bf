"""Every check there is, in the order in which they run."""

import difflib
import importlib
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Final

from openenv_core import checker
from openenv_core.checker.check import Check, Level
from openenv_core.errors import ConfigurationError

MODULES: Final = (
    "static.manifest",
    "static.models",
    "static.dockerfile",
    "static.image",
    "runtime.about",
    "runtime.episodes",
    "runtime.rewards",
    "runtime.tools",
    "semantic.seeds",
    "semantic.sessions",
    "semantic.network",
    "hostile.actions",
    "hostile.endings",
    "load.sessions",
    "load.leaks",
)
"""Those that hold checks, by level."""


@cache
def checks() -> tuple[Check, ...]:
    """Return all checks: module by module, each as its file has them."""
    return tuple(
        one for name in MODULES for one in _checks_of(importlib.import_module(f"{checker.__name__}.{name}"))
    )


def chosen(levels: Iterable[Level] = (), names: Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the checks of some levels and of some names; all of them where neither is given.

    Raises:
        ConfigurationError: There is no check of that name.
    """
    known = {one.name: one for one in checks()}
    wanted = [name.replace("-", "_").removeprefix("check_") for name in names]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "ropewalk validate --list tells them"
            raise ConfigurationError(f"expected the name of a check, got {name!r}; {hint}")
    at = set(levels)
    if not at and not wanted:
        return checks()
    return tuple(one for one in checks() if one.level in at or one.name in wanted)


def _checks_of(module: ModuleType) -> Iterator[Check]:
    for value in vars(module).values():
        if isinstance(value, Check) and value.function.__module__ == module.__name__:
            yield value
