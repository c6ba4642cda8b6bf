"""The import hook: modules under the released package's names, whose attributes resolve to ours on access."""

import sys
from collections.abc import Sequence
from contextlib import suppress
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


class AliasModule(ModuleType):
    """A module whose names are resolved on access."""

    def __init__(self, fullname: str, source: str, hook: "Hook") -> None:
        super().__init__(fullname, f"Ropewalk's stand-in for the released package's {source}.")
        self.__dict__.update(_source=source, _hook=hook)
        self.__all__ = sorted(set(hook.available(source)))
        if source == RELEASED:
            self.__version__ = RELEASED_VERSION

    def __getattr__(self, name: str) -> Any:
        """Resolve a name.

        Raises:
            NotProvidedError: The released package has the name, but Ropewalk does not.
            AttributeError: Neither has it.
        """
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        hook: Hook = self.__dict__["_hook"]
        source: str = self.__dict__["_source"]
        target = hook.target(source, name)
        if target is not None:
            value = resolve_name(target)
        elif module_for(f"{source}.{name}") is not None:
            value = import_module(f"{self.__name__}.{name}")
        elif (belongs := hook.find_unprovided(source, name)) is not None:
            raise NotProvidedError(
                f"expected a name that Ropewalk provides of {self.__name__}, got {name}, which it does not: it "
                f"belongs to {belongs}; {DOCS} lists the names that are there",
                name=f"{self.__name__}.{name}",
            )
        else:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}; {DOCS} lists those it has"
            )
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


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

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module, whose names are resolved on access."""
        source = module_for(spec.name)
        assert source is not None
        return AliasModule(spec.name, source, self)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module by ours if it is `REPLACED`; other modules need nothing."""
        if (source := module_for(module.__name__)) in REPLACED:
            (ours,) = NAMES[source]
            sys.modules[module.__name__] = import_module(ours)

    def forget(self) -> None:
        """Remove the modules that were imported through this hook from `sys.modules`."""
        for name, module in list(sys.modules.items()):
            is_alias = isinstance(module, AliasModule) and module.__dict__["_hook"] is self
            if is_alias or (name != getattr(module, "__name__", name) and module_for(name) is not None):
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:
                    sys.modules[parent].__dict__.pop(child, None)
