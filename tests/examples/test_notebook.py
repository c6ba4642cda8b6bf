"""examples/notebook.ipynb, run cell by cell as Jupyter runs it: in one namespace and one event loop."""

import ast
import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from module_run import ROOT

CELLS = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
COMMAND_TIMEOUT_S = 500.0


@pytest.fixture(autouse=True)
def _restore_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which also returns from the notebook's own folder
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))


async def run_cells(sources: list[str]) -> tuple[Any, str]:
    """Run cells; return the last one's value, and the output of all commands (the lines that begin with !)."""
    names: dict[str, Any] = {}
    outputs: list[str] = []

    async def run_command(command: str) -> None:
        variables = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        process = await asyncio.create_subprocess_shell(
            command,
            env={**os.environ, **variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output, _ = await process.communicate()
        outputs.append(output.decode())
        assert process.returncode == 0, outputs[-1][-3000:]

    names["run_command"] = run_command
    value = None
    for source in sources:
        lines = [
            f"await run_command({line[1:]!r})" if line[:1] == "!" else line for line in source.splitlines()
        ]
        tree = ast.parse("\n".join(lines))
        if isinstance(last := tree.body[-1], ast.Expr):
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
        code = compile(ast.fix_missing_locations(tree), "notebook", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, names)
        if running is not None:
            await running
        value = names.get("_")
    return value, "\n".join(outputs)


@pytest.mark.slow
async def test_it_plays_and_evaluates(capsys: pytest.CaptureFixture[str]) -> None:
    _, output = await run_cells(SOURCES[:3])
    assert "The dealer holds" in capsys.readouterr().out
    assert (
        len(re.findall(r"^blackjack +500  ", output, re.MULTILINE)) == 3
    )  # two evaluations, and their difference
    assert re.search(r"^blackjack +500 .* \+0\.\d+ \[\+", output, re.MULTILINE), "careful is not above random"


@pytest.mark.heavy
@pytest.mark.timeout(600)
async def test_it_trains() -> None:
    (_, endings), output = await run_cells([SOURCES[0], SOURCES[3]])
    assert "200 held-out episodes: mean reward " in output
    assert sum(endings.values()) == 200
