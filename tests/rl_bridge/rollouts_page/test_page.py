"""The page as bytes: whole, harmless, and the same script wherever it is."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

from rl_bridge.records import read_lines
from rl_bridge.rollouts_page.page import policy, render_page, script
from tests.rl_bridge.rollouts_page.page_fixtures import conversation, keep, played, turn


def page_text(run: Path) -> str:
    return b"".join(render_page(run, read_lines(run))).decode()


def block(text: str, name: str) -> str:
    found = re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return found[1]


def test_records_come_out_as_they_went_in(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script><!-- {{script}} {{records}} \\ \u2028"
    records = [*conversation(), played(turn(nasty, nasty), ending=nasty)]
    text = page_text(keep(tmp_path / "run", records))
    lines = block(text, "records").rstrip("\n").split("\n")
    assert [json.loads(line) for line in lines] == [json.loads(r.model_dump_json()) for r in records]
    assert text.count("<script") == 3
    assert "alert(1)" in text
    assert "<script>alert" not in text


def test_names_of_folders_are_text(tmp_path: Path) -> None:
    run = keep(tmp_path / '"><b>&{{script}}', [])
    text = page_text(run)
    assert f"<title>{html.escape(run.name)} · rollouts</title>" in text
    assert "<b>" not in text.partition("<script>")[0]
    assert json.loads(block(text, "settings")) == {"title": run.name}


def test_policy_allows_this_script_and_nothing_from_anywhere(tmp_path: Path) -> None:
    text = page_text(keep(tmp_path / "run", []))
    inline = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    assert inline == script()
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy().split("; "))
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert html.escape(policy()) in text
    assert not re.search(r"https?://|unsafe", text)
