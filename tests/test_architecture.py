"""Allowed imports between packages, read from the source, so that lazy imports count too."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Container, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"openenv_core", "servers", "envs", "rl_bridge", "examples", "benchmarks", "scripts", "tests"}
HEAVY = {"torch", "vllm", "monarch", "torchtitan", "transformers"}
WEB = {"fastapi", "starlette", "uvicorn"}

TEMPLATES = "openenv_core/scaffold/templates"
"""Environments that authors start from: data of the core, and no part of it."""

ALLOWED = {
    "openenv_core": {"openenv_core"},
    "servers": {"servers", "openenv_core"},
    "rl_bridge": {"rl_bridge", "openenv_core"},
    "envs": {"envs", "servers", "openenv_core"},
    TEMPLATES: {"servers", "openenv_core", "rl_bridge"},
}


@cache
def import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    statements = list(ast.parse(path.read_text(), str(path)).body)
    for node in statements:  # which grows: an expression has no statements in it, and is not looked into
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, inner, ())
    return [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> Iterator[str]:
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and not node.level:
            yield node.module


def offenders(package: str, forbidden: set[str], beneath: str = "") -> list[str]:
    files = sorted((ROOT / package / beneath).rglob("*.py"))
    if package != TEMPLATES:
        files = [path for path in files if ROOT / TEMPLATES not in path.parents]
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports(path)
        if name.partition(".")[0] in forbidden
    ]


@pytest.mark.parametrize("package", ALLOWED)
def test_no_package_imports_one_above_it(package: str) -> None:
    assert list((ROOT / package).rglob("*.py"))
    assert offenders(package, OURS - ALLOWED[package]) == []


def test_the_sandbox_could_be_a_distribution_of_its_own() -> None:
    apart = {"openenv_core.errors", "openenv_core.loop_thread", "openenv_core.signals"}
    files = [*(ROOT / "openenv_core/sandbox").rglob("*.py"), ROOT / "openenv_core/loop_thread.py"]
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports(path)
        if name.startswith("openenv_core")
        and not name.startswith("openenv_core.sandbox")
        and name not in apart
    }
    assert wrong == set()


def test_files_that_prose_names_exist() -> None:
    every = [path for package in (*OURS, "docs") for path in (ROOT / package).rglob("*")]
    names = {path.name for path in every}
    places = "\n".join(f"/{path.relative_to(ROOT).as_posix()}" for path in every if path.suffix == ".py")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for path in [
        *pages,
        *(one for one in every if one.suffix == ".py" and ROOT / TEMPLATES not in one.parents),
    ]:
        for named in re.findall(r"`((?:\w+/)*\w+\.py)`", path.read_text(encoding="utf-8")):
            if named.startswith(("dice_", "NAME_")):
                continue  # what a reader makes
            assert Path(named).name in names, f"{path.relative_to(ROOT)} names {named}"
            assert "/" not in named or f"/{named}\n" in f"{places}\n", (
                f"{path.relative_to(ROOT)} names {named}"
            )


def test_web_framework_and_heavy_stack_are_imported_only_where_allowed() -> None:
    assert offenders("openenv_core", WEB) == []
    found = offenders("rl_bridge", WEB)
    assert [one for one in found if not one.startswith("rl_bridge/gateway/")] == []
    for package in ("openenv_core", "servers", "envs"):
        found = offenders(package, HEAVY)
        # The adapter of a trainer subclasses what the trainer has; nothing else imports it.
        assert [one for one in found if not one.startswith("openenv_core/adapters/titan.py ")] == []


def test_only_the_server_side_of_an_environment_knows_servers() -> None:
    for package in ("envs", TEMPLATES):
        wrong = [line for line in offenders(package, {"servers"}) if "/server/" not in line]
        assert wrong == []


def test_error_codes_are_spelled_in_one_module() -> None:
    codes = ("UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR", "CAPACITY_REACHED", "FACTORY_ERROR")
    keys = [f'"{code}"' for code in codes]
    known = [
        str(path.relative_to(ROOT))
        for package in ("openenv_core", "servers")
        for path in (ROOT / package).rglob("*.py")
        if any(key in path.read_text() for key in keys)
    ]
    assert known == ["openenv_core/protocol/errors.py"]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, known: Container[str]) -> Iterator[str]:
    """Yield the modules of ours that a file names, those for type checkers and in functions included."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        else:
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found = name if name in known else base
                if found in known:
                    yield found


def test_no_import_cycles() -> None:
    files = {module_of(p): p for package in ALLOWED for p in (ROOT / package).rglob("*.py")}
    graph = {name: set(imported_modules(path, files)) - {name} for name, path in files.items()}
    assert graph["openenv_core.client.session"] >= {"openenv_core.client.conversation"}
    assert graph["envs.blackjack_env.client"] >= {"envs.blackjack_env.models"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"expected no import cycle, got {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", ALLOWED)
def test_files_stay_small(package: str) -> None:
    long = {p.name: n for p in (ROOT / package).rglob("*.py") if (n := len(p.read_text().splitlines())) > 800}
    assert long == {}


def test_modules_and_folders_of_tests_have_names_of_their_own() -> None:
    """Without packages pytest imports them by their base names: of two that are called alike one is lost."""
    tests = ROOT / "tests"
    data = {tests / name for name in ("checker/gallery", "envs/harbor/tasks", "interop/folders")}
    files = [path for path in tests.rglob("*.py") if not data & {*path.parents}]
    modules = [path.stem for path in files if path.stem not in {"__init__", "__main__", "conftest"}]
    folders = [path.name for path in {path.parent for path in files}]
    for names in (modules, folders):
        assert len(names) > 30
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_hinted_extras_exist() -> None:
    """What errors tell the user to install is an extra of ours."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    hinted = {
        name
        for package in ("openenv_core", "servers", "envs", "rl_bridge", "examples", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        for names in re.findall(r"ropewalk\[([\w,-]+)\]|installed_with\(\s*\"([\w-]+)\"", path.read_text())
        for name in "".join(names).split(",")
    }
    assert len(hinted) > 5
    assert hinted <= extras
