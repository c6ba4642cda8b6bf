"""The packages that an environment's code imports, against those that its dependencies bring into an image."""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any, Final

from openenv_core.checker.check import import_package
from openenv_core.one_file import read_header

PROJECT: Final = "pyproject.toml"
_REQUIREMENTS: Final = ("requirements.txt", "server/requirements.txt")
_CATCHING: Final = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


@dataclass(frozen=True, slots=True)
class ModuleImport:
    """One import of a top-level module.

    Attributes:
        module: The module.
        line: Its line in the file.
        nested: Whether it is in a function, so that it does not run when the server starts.
    """

    module: str
    line: int
    nested: bool


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a folder declares, as requirement specifiers.

    Attributes:
        required: What an image installs.
        optional: What all its extras add.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]


def find_imports(source: str) -> list[ModuleImport]:
    """Return the imports of a module, in order, without those for type checkers and those whose failure is caught."""
    return list(_imports_below(ast.parse(source), in_function=False))


def _imports_below(node: ast.AST, *, in_function: bool) -> Iterator[ModuleImport]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield ModuleImport(alias.name.partition(".")[0], node.lineno, in_function)
    elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
        yield ModuleImport(node.module.partition(".")[0], node.lineno, in_function)
    elif _may_fail(node):
        return
    in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from _imports_below(child, in_function=in_function)


def _may_fail(node: ast.AST) -> bool:
    """Whether imports in a block are for type checkers alone, or may fail."""
    match node:
        case ast.If():
            return "TYPE_CHECKING" in ast.unparse(node.test)
        case ast.Try():
            caught = [ast.unparse(handler.type) if handler.type else "Exception" for handler in node.handlers]
            return any(name in text for text in caught for name in _CATCHING)
        case ast.With():
            return any("suppress" in ast.unparse(item.context_expr) for item in node.items)
    return False


def read_dependencies(folder: Path) -> Dependencies | None:
    """Return what a folder's pyproject.toml and requirements declare; None if it leaves that to another file.

    For an environment in one file, return what its header declares, and Ropewalk.
    """
    if folder.is_file():
        return Dependencies(("ropewalk[server]", *read_header(folder).dependencies), ())
    declared: list[str] = []
    project: dict[str, Any] = {}
    places = [folder / name for name in _REQUIREMENTS if (folder / name).is_file()]
    if (folder / PROJECT).is_file():
        project = tomllib.loads((folder / PROJECT).read_text(encoding="utf-8")).get("project", {})
    if not places and ("dependencies" in project.get("dynamic", ()) or not project):
        return None
    for place in places:
        lines = (line.partition(" #")[0].strip() for line in place.read_text(encoding="utf-8").splitlines())
        declared += [line for line in lines if line and not line.startswith(("#", "-"))]
    optional = [line for extra in project.get("optional-dependencies", {}).values() for line in extra]
    return Dependencies((*declared, *project.get("dependencies", ())), tuple(optional))


def resolve_installed(requirements: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the names of all distributions that requirements bring, and those and extras that are not installed."""
    requirement_type = import_package("packaging.requirements").Requirement
    canonical = import_package("packaging.utils").canonicalize_name
    brought: set[str] = set()
    missing: set[str] = set()
    done: set[tuple[str, frozenset[str]]] = set()
    pending = [(requirement_type(line), frozenset[str]()) for line in requirements]
    while pending:
        requirement, extras_of_parent = pending.pop()
        marker = requirement.marker
        if marker is not None and not any(
            marker.evaluate({"extra": extra}) for extra in (*extras_of_parent, "")
        ):
            continue
        key = canonical(requirement.name), frozenset(requirement.extras)
        if key in done:
            continue
        done.add(key)
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            missing.add(key[0])
            continue
        brought.add(key[0])
        offered = {canonical(extra) for extra in found.metadata.get_all("Provides-Extra") or ()}
        missing |= {f"{key[0]}[{extra}]" for extra in requirement.extras if canonical(extra) not in offered}
        pending += [(requirement_type(line), key[1]) for line in found.requires or ()]
    return brought, missing


def own_sources(folder: Path) -> list[Path]:
    """Return the files of a folder that this process has imported, without installed packages and the folder's tests.

    A file is its only source.

    The checks may run among those tests, whose imports no image needs.
    """
    if folder.is_file():
        return [folder]
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    places = {Path(file).resolve() for file in files if isinstance(file, str)}
    folder = folder.resolve()
    return sorted(
        place
        for place in places
        if place.suffix == ".py"
        and place.is_relative_to(folder)
        and not {"site-packages", "tests"} & set(place.relative_to(folder).parts)
    )


def find_undeclared(
    folder: Path, dependencies: Dependencies
) -> tuple[dict[str, tuple[Path, ModuleImport]], set[str]]:
    """Find imports of installed packages that no dependency brings.

    A module that no installed distribution is known to bring is left out, such as one of the environment's own.

    Returns:
        For each distribution, one import of it; and the declared distributions that are not installed here, which may
        bring them.
    """
    canonical = import_package("packaging.utils").canonicalize_name
    required, missing = resolve_installed(dependencies.required)
    optional, missing_optional = resolve_installed(dependencies.optional)
    distributions: Mapping[str, list[str]] = packages_distributions()
    found: dict[str, tuple[Path, ModuleImport]] = {}
    for file in own_sources(folder):
        for each in find_imports(file.read_text(encoding="utf-8")):
            names = {canonical(name) for name in distributions.get(each.module, ())}
            brought = required | optional if each.nested else required
            if names and not names & brought and each.module not in sys.stdlib_module_names:
                found.setdefault(min(names), (file, each))
    return found, missing | missing_optional
