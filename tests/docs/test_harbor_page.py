"""docs/harbor.md: its example runs, and it names every key that the code reads."""

import re
import sys
from pathlib import Path

import pytest
from module_run import finished

from envs.harbor_env.tasks import AgentTable, EnvironmentTable, TaskTable, VerifierTable

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "harbor.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_prints_what_the_page_is_about() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", block]
    done = finished(*command, cwd=ROOT, timeout_s=200)
    assert done.stdout == "Write the word rope into word.txt.\nnotes.txt\n1.0\n", done.stderr


def test_it_names_every_key_that_is_read() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT)) | {"os", "task", "metadata", "agent", "verifier"}
    for table in (AgentTable, EnvironmentTable, VerifierTable, TaskTable):
        assert set(table.model_fields) - {"steps"} <= named, table
    assert "`[[steps]]`" in TEXT
