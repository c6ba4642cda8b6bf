"""Errors cross processes: a pool of processes, Ray and multiprocessing pickle them."""

import ast
import inspect
import pickle
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import openenv_core.errors
from openenv_core.errors import ConnectionLostError, OpenEnvError
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.tools import ToolErrorType

ROOT = Path(openenv_core.errors.__file__).parents[1]
SAMPLES = {
    "errors": {2: ConnectionLostError("gone")},
    "steps": SimpleNamespace(members=[2]),
    "data": {"errors": [{"loc": ["x"], "msg": "wrong"}], "max_sessions": 4, "factory_name": "Table"},
    "extra": {"place": 1},
    "error_type": ToolErrorType.TIMEOUT,
    "fault": JsonRpcFaultError(-32600, "no method"),
    "last_failure": ValueError("no image"),
    "limit_s": 2.0,
    "headers": {"retry-after": "1"},
}
"""Arguments that are neither a text nor a number."""


def find_classes() -> Iterator[type[Exception]]:
    """Import every public exception class of our packages that has an `__init__` of its own."""
    for package in ("openenv_core", "servers", "envs", "rl_bridge"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "templates" in path.parts or "Error(" not in (text := path.read_text()):
                continue
            for node in ast.parse(text).body:
                if (
                    not isinstance(node, ast.ClassDef)
                    or not node.name.endswith("Error")
                    or node.name[0] == "_"
                ):
                    continue
                if any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in node.body):
                    module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                    yield getattr(module, node.name)


def make(kind: type[Exception]) -> Exception:
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind).parameters.items()):
        number = str(parameter.annotation).startswith("int")
        value = SAMPLES.get(name, 3 if number else f"the {name}")
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[name] = value
        else:
            arguments.append(value)
    return kind(*arguments, **options)


def content(value: object) -> object:
    """Return an error as values that can be compared."""
    if isinstance(value, BaseException):
        return type(value), str(value), content(vars(value))
    if isinstance(value, dict):
        return {key: content(entry) for key, entry in value.items()}
    return value


def test_every_error_is_the_same_after_pickling() -> None:
    kinds = list(find_classes())
    assert len(kinds) > 25
    for kind in kinds:
        error = make(kind)
        error.add_note("in worker 3")
        try:
            again = pickle.loads(pickle.dumps(error))
        except TypeError as failure:
            pytest.fail(f"{kind.__name__} cannot be unpickled: {failure}")
        assert content(again) == content(error)


def test_an_error_with_a_builtin_parent_is_the_same_after_pickling() -> None:
    class ThirdPartyError(OpenEnvError, OSError):
        def __init__(self, number: int) -> None:
            super().__init__(f"number {number}")
            self.number = number

    globals()["ThirdPartyError"] = ThirdPartyError
    ThirdPartyError.__qualname__ = "ThirdPartyError"
    error = pickle.loads(pickle.dumps(ThirdPartyError(5)))
    assert (str(error), error.number) == ("number 5", 5)
