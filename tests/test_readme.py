"""The README's examples run and its claims hold; sources shown in the docs equal the files."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from module_run import finished

from rl_bridge.config import load_config

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r"<!-- ([\w/.]+\.py) -->\n```python\n(.*?)```\n", re.DOTALL)
"""A source in the docs is the file itself, whole: `<!-- path -->` and then the block."""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def output_of(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = finished(*command, cwd=ROOT, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_six_lines_of_python_play_a_hand() -> None:
    (code,) = blocks("README.md", "python")
    text = output_of(f"{code}\nimport sys\nassert 'torch' not in sys.modules")
    assert re.fullmatch(r"You hold .* The dealer holds .* (-1|0|1)\.0\n", text), text


def test_claims_of_the_comparison_are_run_or_measured() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Compared with OpenEnv")[1]
    measured = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\|.*", table, re.MULTILINE)[2:]]
    assert len([row for row in rows if "benchmarks" in row[3]]) == 3
    for what, released, ours, run_by in rows:
        for path in re.findall(r"`(tests[\w/.]*)`", run_by):
            assert (ROOT / path).exists(), path
        if "benchmarks" in run_by:
            for figure in re.findall(r"[\d.]+(?= (?:µs|kB|s\b))", released + ours):
                assert f" {figure} " in measured, (what, figure)


def test_every_override_that_is_shown_is_a_key() -> None:
    shown = re.findall(r"(?:^|\s)([a-z_]+\.[a-z_]+=\S+)", "\n".join(blocks("docs/training.md", "bash")))
    assert len(shown) > 5
    for override in shown:
        load_config(ROOT / "examples/grpo_blackjack/config.yaml", [override])


def test_every_extra_that_is_listed_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = re.findall(
        r"^\| `([\w-]+)` \|", (ROOT / "docs/installing.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert set(listed) == set(project["optional-dependencies"]) - {"rl-common"}


def test_docs_show_files_as_they_are() -> None:
    shown = [
        (page.name, *block)
        for page in (ROOT / "docs").rglob("*.md")
        for block in INCLUDED.findall(page.read_text())
    ]
    assert "rl_bridge/loops/grpo.py" in {path for _, path, _ in shown}
    for page, path, block in shown:
        assert block == (ROOT / path).read_text(), f"{page} shows another {path}"
