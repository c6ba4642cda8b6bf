"""The import hook: modules under the released package's names, whose attributes resolve to ours on access."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Final

from openenv_core.compat.names import (
    MODULES,
    NAMES,
    REASONS,
    RELEASED,
    RELEASED_VERSION,
    REPLACED,
    UNPROVIDED,
    module_for,
    with_included,
)
from openenv_core.packages import import_ours

GROUP: Final = "ropewalk.compat"
"""Entry points by which installed packages provide names."""

DOCS: Final = "docs/compatibility.md"


class NotProvidedError(ModuleNotFoundError):
    """A name of the released package that Ropewalk does not provide."""


def _find_names() -> dict[str, dict[str, str]]:
    """Return the names of the table and those of installed packages, by module."""
    found = {module: dict(names) for module, names in MODULES.items()}
    for point in entry_points(group=GROUP):
        with suppress(ImportError):  # the package is installed, but not its requirements
            import_ours(point.module)
            for module, names in point.load().items():
                found[module].update(names)
    return found


class Hook(MetaPathFinder, Loader):
    """Finds and loads the released package's modules, and resolves every released name to its counterpart here.

    Attributes:
        names: By module, the target of each name as `module:attribute`.
    """

    def __init__(self) -> None:
        self.names = _find_names()

    def available(self, module: str) -> list[str]:
        """Return the names that a module provides."""
        return [name for each in with_included(module) for name in self.names[each]]

    def target(self, module: str, name: str) -> str | None:
        """Return the target of a name; None if it is not provided."""
        targets = (self.names[each].get(name) for each in with_included(module))
        return next(filter(None, targets), None)

    def find_unprovided(self, module: str, name: str) -> str | None:
        """Return what an unprovided name belongs to; None if the released package has no such name."""
        modules = [*with_included(module)]
        reasons = [*(UNPROVIDED.get((each, name)) for each in modules), *map(REASONS.get, modules)]
        return next(filter(None, reasons), None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the modules of the table, otherwise None."""
        source = module_for(fullname)
        if source is None:
            return None
        is_package = any(module.startswith(f"{source}.") for module in MODULES)
        return ModuleSpec(fullname, self, origin="openenv_core.compat", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the creation of a module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Have a module's names resolved on access; one of `REPLACED` is replaced by ours."""
        source = module_for(module.__name__)
        assert source is not None
        if source in REPLACED:
            (ours,) = NAMES[source]
            sys.modules[module.__name__] = import_module(ours)
            return
        names = sorted(set(self.available(source)))
        vars(module).update(
            __doc__=f"Ropewalk's stand-in for the released package's {source}.",
            __all__=names,
            __dir__=lambda: sorted({*vars(module), *names}),
            __getattr__=partial(self._resolve, module, source),
        )
        if source == RELEASED:
            vars(module)["__version__"] = RELEASED_VERSION

    def _resolve(self, module: ModuleType, source: str, name: str) -> Any:
        """Return the object of a name, and keep it in its module.

        Raises:
            NotProvidedError: The released package has the name, but Ropewalk does not.
            AttributeError: Neither has it.
        """
        fullname = f"{module.__name__}.{name}"
        if (target := self.target(source, name)) is not None:
            value = resolve_name(target)
        elif module_for(f"{source}.{name}") is not None:
            value = import_module(fullname)
        elif (belongs := self.find_unprovided(source, name)) is not None and not name.startswith("__"):
            raise NotProvidedError(
                f"expected a name that Ropewalk provides of {module.__name__}, got {name}, which it does not: it "
                f"belongs to {belongs}; {DOCS} lists the names that are there",
                name=fullname,
            )
        else:
            raise AttributeError(
                f"module {module.__name__!r} has no attribute {name!r}; {DOCS} lists those it has"
            )
        vars(module)[name] = value
        return value
