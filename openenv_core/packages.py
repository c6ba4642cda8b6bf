"""The packages installed beside this one, found there although other folders have their names.

A clone of the released package's repository has a folder `envs/`, and a user may call one `servers/`. Python would
import those where they come first on its path, as the working directory does. After `prefer_ours`, which the processes
of commands call, imports find:

- ours of `dockerfiles`, `rl_bridge` and `servers`;
- the modules of every folder `envs`. The first folder with an `__init__.py` is the package, as without `prefer_ours`.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

from openenv_core.errors import ConfigurationError

ENVS: Final = "envs"
"""The package that others may have modules of."""

OURS: Final = frozenset({"dockerfiles", ENVS, "rl_bridge", "servers"})

_ROOT: Final = Path(__file__).parents[1]


def own_folder(package: str) -> Path | None:
    """Return the folder of a package of ours, such as `envs.blackjack_env`; None if it is not ours or not installed."""
    folder = _ROOT.joinpath(*package.split("."))
    return folder if package.partition(".")[0] in OURS and folder.is_dir() else None


def spec_of(name: str, path: Iterable[str]) -> ModuleSpec | None:
    """Return the spec of a top-level package of ours, on a path like `sys.path`; None if it is no such package."""
    if (own := own_folder(name)) is None or not (own / "__init__.py").is_file():
        return None
    places = [own]
    if name == ENVS:
        named = dict.fromkeys(Path(entry or ".").absolute() / name for entry in (*path, str(_ROOT)))
        # As Python does: those with code in the order of the path, then those without.
        places = sorted(filter(Path.is_dir, named), key=lambda place: not (place / "__init__.py").is_file())
    locations = [str(place) for place in places]
    return spec_from_file_location(name, places[0] / "__init__.py", submodule_search_locations=locations)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_of(fullname, sys.path) if path is None else None


_FINDER: Final = _Finder()


def prefer_ours() -> None:
    """Let the imports of this process find our packages, for a process that runs our commands only. Idempotent."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def add_ours(name: str) -> None:
    """Import a package of ours without the code of others, or add its modules to those of what has its name already."""
    if (own := own_folder(name)) is None:
        return
    if (package := sys.modules.get(name)) is None:
        spec = spec_of(name, ())
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = package = module_from_spec(spec)
        spec.loader.exec_module(package)
    elif str(own) not in (folders := list(getattr(package, "__path__", ()))):
        package.__path__ = [*folders, str(own)]


def import_ours(module: str) -> ModuleType:
    """Import a module in a program that may have packages of the same names, and keeps them; ours need not be first.

    Raises:
        ConfigurationError: The program has a module of the whole name.
    """
    name = module.partition(".")[0]
    if (own := own_folder(name)) is not None:
        with suppress(Exception):  # raised by a package of the program's, without which ours is imported
            import_module(name)
        add_ours(name)
    imported = import_module(module)
    place = Path(imported.__file__ or "").resolve()
    if own is not None and not place.is_relative_to(own.resolve()):
        raise ConfigurationError(f"{place.parent} hides Ropewalk's package {module}; rename that folder")
    return imported


def hidden_by_ours(module: str) -> Path | None:
    """Return the first folder or file of the path that a package of ours hides from an import; None without one."""
    name = module.partition(".")[0]
    found = list(getattr(sys.modules.get(name), "__path__", ()))
    if str(own_folder(name)) not in found:
        return None
    places = (Path(entry or ".").absolute() / f"{name}{end}" for entry in sys.path for end in ("", ".py"))
    return next((place for place in places if place.exists() and str(place) not in found), None)


def python_command(module: str) -> tuple[str, ...]:
    """Return the command `python -m MODULE`, without the working directory's modules before those that it imports."""
    return (sys.executable, "-P", "-m", module)


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of ours as `python -m MODULE` does, after `prefer_ours`."""
    return (*python_command("openenv_core"), module)
