"""docs/tutorials/author.md, run as it is written: by a new user, in a new environment, with a clone beside it."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from doc_pages import blocks, commands, page
from docker_engine import engine
from module_run import ROOT

from openenv_core.providers.docker import DockerEngine
from openenv_core.scaffold import making

__all__ = ["engine"]

PAGE = page("docs/tutorials/author.md")
IMAGE = "dice-env:latest"
FOLDER = Path(making.__file__).with_name("templates") / "file"
AT_MOST = 12
TIMEOUT_S = 1800

ENDED = "\x1e"
"""Begins the line that the script prints after each command: its number and its status."""


@dataclass(frozen=True)
class CommandResult:
    """One command of the page and what came of it."""

    command: str
    status: int
    output: str


def typed_commands() -> list[str]:
    """Return what a reader would type or run, one command each; a Python block is a script to run."""
    found: list[str] = []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE):
        if language == "py":  # a file that is shown: what `ropewalk init` writes, and what may stand in it
            continue
        assert language in ("bash", "python"), f"nobody runs blocks of {language}"
        found += commands(block) if language == "bash" else [f"python - <<'SCRIPT'\n{block}SCRIPT"]
    return found


def test_the_page_is_short_and_goes_from_an_installation_to_a_checked_image() -> None:
    found = typed_commands()
    assert len(found) <= AT_MOST
    assert found[0].startswith("pip install ")
    assert f"ropewalk validate {IMAGE}" in found
    assert (FOLDER / "place_holder.py").read_text().replace("place_holder", "dice").replace(
        "PlaceHolder", "Dice"
    ) == blocks(PAGE, "py")[0]
    assert all(f"ropewalk {word}" in "\n".join(found) for word in ("init", "play", "validate", "build"))


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.timeout(TIMEOUT_S + 120)
def test_every_command_of_the_page_does_what_it_says(engine: DockerEngine, tmp_path: Path) -> None:
    there_before = engine.has_image(IMAGE)
    clone(tmp_path / "ropewalk")
    python = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(python)], check=True, timeout=120)
    try:
        results = follow(typed_commands(), tmp_path, python)
    finally:
        if not there_before:
            remove = ["docker", "image", "rm", "--force", IMAGE]
            subprocess.run(remove, capture_output=True, timeout=60, check=False)
    for one in results:
        assert one.status == 0, f"{one.command} ended with {one.status}:\n{one.output[-6000:]}"
    assert [one.command for one in results] == typed_commands()
    by_command = {one.command: one.output for one in results}
    assert "reward 1" in next(text for command, text in by_command.items() if "ropewalk play" in command)
    for command in ("ropewalk validate dice.py", f"ropewalk validate {IMAGE}"):
        summary = by_command[command].rstrip().splitlines()[-1]
        counts = re.search(r": \d+ checks: (\d+) passed(, \d+ skipped)? in [\d.]+ s$", summary)
        assert counts is not None, by_command[command][-6000:]
        assert int(counts[1]) >= 15
    assert re.search(r"\d+ passed", by_command["pytest test_dice.py"])
    script = next(text for command, text in by_command.items() if command.startswith("python -"))
    assert script.split() == ["it", "was", "2", "1.0", "True"]


def clone(folder: Path) -> None:
    """Copy what a clone would have of this working tree: what is committed or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def follow(command_list: list[str], folder: Path, python: Path) -> list[CommandResult]:
    """Type commands into one shell, up to the first that fails."""
    script = "".join(
        f"{command}\nstatus=$?; printf '\\n{ENDED}%d %d\\n' {number} $status; [ $status = 0 ] || exit\n"
        for number, command in enumerate(command_list)
    )
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ROPEWALK"))
    }
    variables |= {"VIRTUAL_ENV": str(python), "PATH": f"{python / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with (folder / "said").open("w+b") as output_file:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=variables, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output_file, stderr=output_file,
        )  # fmt: skip
        try:
            shell.wait(TIMEOUT_S)
        except BaseException:
            os.killpg(shell.pid, 15)
            shell.wait()
            raise
        output_file.seek(0)
        text = output_file.read().decode(errors="replace")
    results: list[CommandResult] = []
    for output, number, status in re.findall(rf"(.*?)\n{ENDED}(\d+) (\d+)\n", text, flags=re.DOTALL):
        results.append(CommandResult(command_list[int(number)], int(status), output))
    return results
