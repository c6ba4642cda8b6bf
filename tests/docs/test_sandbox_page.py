"""docs/sandbox.md: its examples are run, and its tables held against the code."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import get_args

import pytest
from doc_pages import blocks, page, printed

from envs.code_interpreter_env.server import settings
from envs.code_interpreter_env.server.backends import TOGETHER
from openenv_core.sandbox import Isolation, Limits, Status
from openenv_core.sandbox.config import LADDER

TEXT = page("docs/sandbox.md")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

EXAMPLES = [
    r"ok 42 (namespaces|lsm)\ntimeout 124 False\n",
    r"error ZeroDivisionError 1\n7\n.*link.*\n",
    r"killed False 1\n\['11', '12'\]\n",
]
"""What the blocks of Python print, in order."""


def rows(first: str) -> list[list[str]]:
    """Return the rows below the line that begins with these cells, as cells without their marks."""
    lines = TEXT[TEXT.index(f"\n| {first}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_example_prints_what_the_page_is_about() -> None:
    with ThreadPoolExecutor() as threads:
        for expected, output in zip(EXAMPLES, threads.map(printed, blocks(TEXT, "python")), strict=True):
            assert re.fullmatch(expected, output), output


def test_limits_and_ceilings_are_those_of_the_code() -> None:
    documented = {name: (default, ceiling) for name, default, ceiling, _ in rows("Limit |")}
    assert set(documented) == {field.name for field in fields(Limits)}
    for name, (default, ceiling) in documented.items():
        assert value(default) == getattr(Limits(), name), name
        assert value(ceiling) == getattr(settings.CEILINGS, name), name


def value(text: str) -> float | bool:
    if text in ("false", "true"):
        return text == "true"
    number, _, unit = text.partition(" ")
    return float(number) * UNITS.get(unit, 1)


def test_levels_statuses_backends_and_variables_are_those_of_the_code() -> None:
    for head in re.findall(r"^\|(?: Threat)? \| (namespaces.*) \|$", TEXT, flags=re.MULTILINE):
        assert head.split(" | ") == list(LADDER) == list(Isolation)
    assert {row[0] for row in rows("`status` |")} == set(get_args(Status))
    assert f"`{settings.PREFIX}BACKEND={TOGETHER}`" in TEXT
    variables = {row[0].partition("`")[0] for row in rows("Variable |")}
    limits = {name for name in variables if name.endswith("TIMEOUT_S")}
    assert limits == {f"{settings.PREFIX}TIMEOUT_S", f"{settings.PREFIX}MAX_TIMEOUT_S"}
    assert variables - limits == {f"{settings.PREFIX}BACKEND", *settings._VARIABLES}
