"""No option without a user: every key of the configuration is read somewhere in the bridge."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rl_bridge
from rl_bridge.config import Config
from rl_bridge.config.monarch import RestartPolicy, RolesConfig
from rl_bridge.config.sections import Section
from tests.rl_bridge.config.sections import section_of

PACKAGE = Path(rl_bridge.__file__).parent


def sections(model: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for name, field in model.model_fields.items():
        found = section_of(field.annotation)
        if found is not None:
            yield name, found


SECTIONS: dict[str, type[Section]] = {**dict(sections(Config)), "restarts": RestartPolicy}
KEYS = sorted(
    [f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]
    + [name for name in Config.model_fields if name not in SECTIONS]
)
# What they decide is settled when the configuration is made: a preset's keys, the rows of the role table, a task.
# Some are read by way of a property: `Config.shares_prefixes`, `EnvConfig.seatings`.
SETTLED_AT_ONCE = {
    "algorithm.name",
    "env.exchange_seats",
    "env.task",
    "env.trained_seats",
    "trainer.num_gpus",
    "trainer.share_prefixes",
}


def last_name(node: ast.expr) -> str | None:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    return None if name is None else name.lstrip("_")  # a section may be kept: `self._rollout`


def bindings(function: ast.AST) -> Iterator[tuple[str, str | None]]:
    """`x = run.config.rollout`, and `x, y = run.config.rollout, run.config.algorithm`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            for name, what in pairs:
                if isinstance(name, ast.Name):
                    yield name.id, last_name(what)


def reads(source: str) -> set[str]:
    """Every `section.key` that the source reads, and every top-level key read from a `config`."""
    found: set[str] = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        local = {name: section for name, section in bindings(function) if section in SECTIONS}
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            owner = last_name(node.value)
            section = local.get(owner or "", owner)
            if section in SECTIONS:
                found.add(f"{section}.{node.attr}")
            elif owner == "config":
                found.add(node.attr)
    return found


@pytest.fixture(scope="module")
def everything_read() -> set[str]:
    sources = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "config" not in path.parents]
    return set().union(*(reads(path.read_text(encoding="utf-8")) for path in sources))


def test_every_key_is_read(everything_read: set[str]) -> None:
    assert [key for key in KEYS if (key in everything_read) == (key in SETTLED_AT_ONCE)] == []


def test_every_role_is_started() -> None:
    read_roles = {
        node.attr
        for path in (PACKAGE / "loops").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and last_name(node.value) in {"roles", "role_table"}
    }
    assert set(RolesConfig.model_fields) <= read_roles
