"""The README's examples run and its claims hold; sources shown in the docs equal the files."""

import re
import tomllib

import pytest
from doc_pages import blocks, page, printed
from module_run import ROOT

from rl_bridge.config import load_config

INCLUDED = re.compile(r"<!-- ([\w/.]+\.py) -->\n```python\n(.*?)```\n", re.DOTALL)
"""A source in the docs is the file itself, whole: `<!-- path -->` and then the block."""


@pytest.mark.slow
def test_six_lines_of_python_play_a_hand() -> None:
    (code,) = blocks(page("README.md"), "python")
    text = printed(f"{code}\nimport sys\nassert 'torch' not in sys.modules")
    assert re.fullmatch(r"You hold .* The dealer holds .* (-1|0|1)\.0\n", text), text


def test_claims_of_the_comparison_are_run_or_measured() -> None:
    table = page("README.md").split("## Compared with OpenEnv")[1]
    measured = page("docs/performance.md")
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\|.*", table, re.MULTILINE)[2:]]
    assert len([row for row in rows if "benchmarks" in row[3]]) == 3
    for what, released, ours, run_by in rows:
        for path in re.findall(r"`(tests[\w/.]*)`", run_by):
            assert (ROOT / path).exists(), path
        if "benchmarks" in run_by:
            for figure in re.findall(r"[\d.]+(?= (?:µs|kB|s\b))", released + ours):
                assert f" {figure} " in measured, (what, figure)


def test_every_override_that_is_shown_is_a_key() -> None:
    shown = re.findall(r"(?:^|\s)([a-z_]+\.[a-z_]+=\S+)", "\n".join(blocks(page("docs/training.md"), "bash")))
    assert len(shown) > 5
    for override in shown:
        load_config(ROOT / "examples/grpo_blackjack/config.yaml", [override])


def test_every_extra_that_is_listed_is_one() -> None:
    project = tomllib.loads(page("pyproject.toml"))["project"]
    listed = re.findall(r"^\| `([\w-]+)` \|", page("docs/installing.md"), flags=re.MULTILINE)
    assert set(listed) == set(project["optional-dependencies"]) - {"rl-common"}


def test_docs_show_files_as_they_are() -> None:
    shown = [block for file in (ROOT / "docs").rglob("*.md") for block in INCLUDED.findall(file.read_text())]
    assert "rl_bridge/loops/grpo.py" in {path for path, _ in shown}
    for path, block in shown:
        assert block == page(path), f"another {path} is shown"
