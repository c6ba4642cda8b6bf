"""docs/tools.md: its example is run, and what it names is there."""

import re
import subprocess
import sys
from pathlib import Path

import openenv_core.tools
from openenv_core.tools import ToolContext, ToolErrorType

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tools.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_is_about() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", block]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "invalid_args 0.0\n{'ada': 20, 'bob': 10} 1.0\n", done.stderr


def test_what_it_names_is_there() -> None:
    for name in re.findall(r"`((?:Tool|Text|Image|Audio|Embedded|Link|Message)\w*)\b", TEXT):
        assert hasattr(openenv_core.tools, name), name
    for name in re.findall(r"`(?:await )?context\.(\w+)", TEXT):
        assert hasattr(ToolContext, name), name
    told = {
        kind
        for row in TEXT.splitlines()
        if row.startswith("|")
        for kind in re.findall(r"`(\w+_\w+|timeout)`", row)
    }
    assert told >= set(ToolErrorType)
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (PAGE.parent / target).resolve().exists(), target
