"""The import hook: modules under the released package's names, whose attributes resolve to ours on access."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
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


@cache
def _find_installed() -> Mapping[str, Mapping[str, str]]:
    """Return the names of installed packages, by module.

    Not before a name is needed that is not in the table: their modules are imported.
    """
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for point in entry_points(group=GROUP):
        with suppress(ImportError):  # the package is installed, but not its requirements
            import_ours(point.module)
            for module, names in point.load().items():
                found[module].update(names)
    return found


class Hook(MetaPathFinder, Loader):
    """Finds and loads the released package's modules, and resolves every released name to its counterpart here."""

    def available(self, module: str) -> list[str]:
        """Return the names that a module provides."""
        modules = list(with_included(module))
        installed = _find_installed()
        return sorted({name for each in modules for name in (*MODULES[each], *installed.get(each, ()))})

    def target(self, module: str, name: str) -> str | None:
        """Return the target of a name as `module:attribute`; None if it is not provided."""
        modules = list(with_included(module))
        targets = (MODULES[each].get(name) for each in modules)
        installed = (_find_installed().get(each, {}).get(name) for each in modules)
        return next(filter(None, targets), None) or next(filter(None, installed), None)

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
        vars(module).update(
            __doc__=f"Ropewalk's stand-in for the released package's {source}.",
            __dir__=lambda: sorted({*vars(module), *self.available(source)}),
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
        value: Any
        if name == "__all__":
            value = self.available(source)
        elif name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        elif (target := self.target(source, name)) is not None:
            value = resolve_name(target)
        elif module_for(f"{source}.{name}") is not None:
            value = import_module(fullname)
        elif (belongs := self.find_unprovided(source, name)) is not None:
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
