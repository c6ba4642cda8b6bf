"""docs/tutorials, typed as they stand: commands into one folder, scripts, and what they print."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 120
OURS = ("pip install ",)
"""Commands that this environment has seen already."""


@dataclass
class Reader:
    """Types what a page says, in a folder of its own.

    Attributes:
        folder: Where commands are typed.
        servers: Those that were started, which end with the page.
        addresses: The address in the page, and the one that the latest server has instead.
    """

    folder: Path
    servers: ExitStack
    addresses: dict[str, str] = field(default_factory=dict)

    def follow(self, page: str) -> None:
        said = ""
        for language, block in BLOCK.findall(page):
            if language == "bash":
                said = "".join(map(self.type, commands(block)))
            elif language == "python":
                said = self.run([sys.executable, "-W", "error", "-c", self.here(block)])
            elif language == "text":
                for line in block.splitlines():
                    assert line in said, said
            else:
                assert language in ("json", "yaml"), f"nobody runs blocks of {language}"

    def type(self, command: str) -> str:
        if command.startswith(OURS):
            return ""
        if command.startswith("ropewalk serve "):
            self.servers.close()  # the page has stopped the one before
            self.addresses["127.0.0.1:8000"] = self.servers.enter_context(serving(command, self.folder))
            return ""
        return self.run(["bash", "-c", self.here(command)])

    def here(self, text: str) -> str:
        for shown, real in self.addresses.items():
            text = text.replace(shown, real)
        return text

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=variables(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def commands(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWALK")}
    return kept | {"PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}


@contextmanager
def serving(command: str, folder: Path) -> Iterator[str]:
    """Run a server on a port that is free, and yield its address; it must end in order."""
    command = f"exec {command.partition('#')[0]} --port 0"
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            found = re.search(r" on http://[\w.]+:(\d+)", first)
            assert found, first + process.stdout.read()
            yield f"127.0.0.1:{found[1]}"
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mcp", "serve"])
def test_a_tutorial_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    with ExitStack() as servers:
        Reader(tmp_path, servers).follow((TUTORIALS / f"{name}.md").read_text(encoding="utf-8"))
