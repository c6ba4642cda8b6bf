"""docs/evaluating.md: its first commands are run, with fewer episodes, by the policy that it shows."""

import re
import shlex
from pathlib import Path

import pytest

from openenv_core.cli.eval import COMMAND
from openenv_core.cli.main import run

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "evaluating.md").read_text(encoding="utf-8")


def test_two_policies_are_evaluated_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (policy,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_policies.py").write_text(policy)
    first_block = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)[0]
    for line in first_block.replace("20000", "100").splitlines():
        command, name, *words = shlex.split(line, comments=True)
        if name == "eval":
            assert (command, run(COMMAND, words)) == ("ropewalk", 0)
    output = capsys.readouterr().out
    heading, row = re.findall(r"^```text\n(.*)\n(.*)\n```", PAGE, flags=re.MULTILINE)[0]
    assert output.splitlines()[0].split() == heading.split()
    assert "B better" in output
    assert (tmp_path / "evals" / "basic" / "evaluation.json").exists()
    assert row.split()[0] == "blackjack"
