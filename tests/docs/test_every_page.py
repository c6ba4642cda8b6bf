"""Every block of every page and README: its commands and their options exist, its imports work, its data can be read,
and the files that the page links to or names are there.

What can be run as it stands is run by the other files of this folder, and by the tests of what the page is about.
"""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from doc_pages import blocks, commands
from module_run import ROOT

from benchmarks.harness import load as load_benchmark
from openenv_core.cli.main import GROUP, load

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(
        path for folder in ("envs", "examples", "dockerfiles") for path in (ROOT / folder).rglob("README.md")
    ),
]
READERS_OWN = ("my_env", "dice_env", "my_game", "PLACEHOLDER")
"""Packages that a reader is told to make; pages that make them run them."""
TRAINERS = ("trl", "skyrl_gym", "stable_baselines3", "torchtitan", "openenv_core.adapters.titan")
"""Heavy ones, and an adapter that imports one, which tests/adapters imports where it runs the page's blocks."""


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield what a shell would run, word by word, without its comments."""
    for block in blocks(page.read_text(), "bash", "sh", ""):
        for line in commands(block):
            if re.match(r"ropewalk \w|python -m benchmarks\.", line):
                yield shlex.split(line.rpartition("&& ")[2], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    folders = "constraints|dockerfiles|docs|envs|examples|scripts"
    for path in re.findall(rf"(?<![\w./-])(?:\./)?((?:{folders})/[\w./-]*\w)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_their_options(page: Path) -> None:
    points = {point.name: point for point in entry_points(group=GROUP)}
    for words in command_lines(page):
        if words[0] == "ropewalk":
            command = load(points[words[1]])
            parser = argparse.ArgumentParser()
            command.configure(parser)
            arguments = words[2:] if command.reword is None else command.reword(words[2:])
            parser.parse_intermixed_args(arguments)
        else:
            name = words[2].removeprefix("benchmarks.")
            load_benchmark(name).parser(name).parse_args(words[3:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_compiles_and_its_imports_are_there(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        tree = compile(block, page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            top = node.module.partition(".")[0]
            # The names of the compatibility page, of `openenv`, are tested with the hook that answers for them.
            if node.level or {top, node.module} & {"openenv", *READERS_OWN, *TRAINERS}:
                continue
            if importlib.util.find_spec(top) is None:
                continue
            module = importlib.import_module(node.module)
            for name in node.names:
                found = name.name == "*" or hasattr(module, name.name)
                full_name = f"{node.module}.{name.name}"
                assert found or importlib.util.find_spec(full_name), full_name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_data_can_be_read(page: Path) -> None:
    for block in blocks(page.read_text(), "yaml"):
        for document in yaml.safe_load_all(block):
            assert document is not None
    for block in blocks(page.read_text(), "json"):
        for line in [block] if block.count("\n{") == 0 else block.splitlines():
            json.loads(line)
