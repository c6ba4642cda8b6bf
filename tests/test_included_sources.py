"""Sources that the docs show are the files themselves, whole: `<!-- path -->` and then the block."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r"<!-- ([\w/.]+\.py) -->\n```python\n(.*?)```\n", re.DOTALL)


def test_docs_show_files_as_they_are() -> None:
    shown = [
        (page.name, *block)
        for page in (ROOT / "docs").glob("*.md")
        for block in INCLUDED.findall(page.read_text())
    ]
    assert "rl_bridge/loops/grpo.py" in {path for _, path, _ in shown}
    for page, path, block in shown:
        assert block == (ROOT / path).read_text(), f"{page} shows another {path}"
