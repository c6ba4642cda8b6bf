"""docs/evaluating.md: its first commands are run, with fewer episodes, by the policy that it shows."""

import re
import shlex
from pathlib import Path

import pytest
from doc_pages import blocks, page

from openenv_core.cli.eval import COMMAND
from openenv_core.cli.main import run

pytestmark = pytest.mark.slow

PAGE = page("docs/evaluating.md")


def test_two_policies_are_evaluated_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (policy,) = blocks(PAGE, "python")
    (tmp_path / "my_policies.py").write_text(policy)
    for line in blocks(PAGE, "bash")[0].replace("20000", "100").splitlines():
        command, name, *words = shlex.split(line, comments=True)
        if name == "eval":
            assert (command, run(COMMAND, words)) == ("ropewalk", 0)
    output = capsys.readouterr().out
    heading, row = re.findall(r"^```text\n(.*)\n(.*)\n```", PAGE, flags=re.MULTILINE)[0]
    assert output.splitlines()[0].split() == heading.split()
    assert "B better" in output
    assert (tmp_path / "evals" / "basic" / "evaluation.json").exists()
    assert row.split()[0] == "blackjack"
