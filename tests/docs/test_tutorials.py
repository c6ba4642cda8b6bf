"""docs/tutorials, typed as they stand: commands into one folder, scripts, and what they print.

train.md is run by test_train_tutorial.py, and the whole of author.md, images too, by test_author_tutorial.py.
"""

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
from doc_pages import commands, page
from module_run import finished
from terminal_process import in_terminal

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 240
ELSEWHERE = ("pip install ", "pytest", "ropewalk validate ", "ropewalk build ")
"""Begin commands that the soak test of the author's tutorial types, and tests/scaffold in parts."""
WITHOUT_DOCKER = {'from_docker_image("dice-env:latest")': "from_process()"}


@dataclass
class Reader:
    """Types what a page says, in a folder of its own.

    Attributes:
        folder: Where commands are typed.
        servers: Those that were started, which end with the page.
        instead: What is typed in place of what the page says: the latest server's address, for one.
    """

    folder: Path
    servers: ExitStack
    instead: dict[str, str] = field(default_factory=WITHOUT_DOCKER.copy)

    def follow(self, page: str) -> None:
        output = ""
        for language, block in BLOCK.findall(page):
            if language == "bash":
                output = "".join(map(self.type, commands(block)))
            elif language == "python":
                output = self.run([sys.executable, "-W", "error", "-c", self.here(block)])
            elif language == "text":
                for line in block.splitlines():
                    assert line in output, output
            else:
                assert language in ("json", "yaml", "py"), f"nobody runs blocks of {language}"
                if language == "py":  # a file that is shown, and is to be written if no command has done so
                    file = self.folder / block.partition("\n")[0].removeprefix("# ")
                    if not file.exists():
                        file.write_text(block)

    def type(self, command: str) -> str:
        if command.startswith(ELSEWHERE):
            return ""
        if command.startswith("cd "):
            self.folder /= command[3:]
            return ""
        if command.startswith("ropewalk serve "):
            self.servers.close()  # the page has stopped the one before
            self.instead["127.0.0.1:8000"] = self.servers.enter_context(serving(command, self.folder))
            return ""
        if " --table " in command:
            return self.play_together(self.here(command).split()[1:])
        return self.run(["bash", "-c", self.here(command)])

    def play_together(self, command: list[str]) -> str:
        """Play in two terminals, in turn; return what the first player has seen."""
        with in_terminal(*command) as first:
            first.until("waiting for the other players ...")
            with in_terminal(*command) as second:
                for terminal, number in ((first, "3"), (second, "1"), (first, "3")):
                    terminal.until("\nnumber (integer 1..3): ")
                    terminal.type(number)
                second.until("You lose.")
                first.until("You win.")
                return first.shown

    def here(self, text: str) -> str:
        for shown, real in self.instead.items():
            text = text.replace(shown, real)
        return text

    def run(self, command: list[str]) -> str:
        done = finished(*command, cwd=self.folder, env=variables(self.folder.parent), timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def variables(packages: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWALK")}
    return inherited | {
        "PYTHONPATH": str(packages),
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def serving(command: str, folder: Path) -> Iterator[str]:
    """Run a server on a port that is free, and yield its address; it must end in order."""
    command = f"exec {command.partition('#')[0]} --port 0"
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=variables(folder.parent),
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


@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("name", ["author", "mcp", "players", "serve"])
def test_a_tutorial_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    with ExitStack() as servers:
        Reader(tmp_path, servers).follow(page(f"docs/tutorials/{name}.md"))
