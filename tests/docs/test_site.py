"""The docs as a site: every link, anchor and name of it is there, and a reader's browser is sent nowhere else."""

import os
import re
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest
from missing import missing
from module_run import ROOT, finished, venv_python

pytestmark = pytest.mark.slow

TIMEOUT_S = 600
HOW_TO = "python3.11 scripts/bootstrap.py docs makes it, ./scripts/test --all does so too"
PROMISED = ("openenv_core", "openenv_core.tools", "openenv_core.sandbox", "rl_bridge.rollout", "servers")
"""Packages whose public names are all in the reference."""


class Page(HTMLParser):
    """What a page of the site loads, and the names that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.names |= {attributes.get("id") or ""}
        source = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
        if source:
            self.loaded.add(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built; a dead link, a page outside of the navigation or a docstring that names no
    argument of its function fails it."""
    python = venv_python("docs")
    if not python.is_file():
        missing(f"needs MkDocs in .venvs; {HOW_TO}")
    folder = tmp_path_factory.mktemp("site")
    command = [str(python), "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = finished(*command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))
    loaded = {(path, source) for path, page in pages.items() for source in page.loaded}
    assert [(path, source) for path, source in loaded if re.match(r"(https?:)?//", source)] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//", styles) == []


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_every_promised_name_has_its_place_in_the_reference(site: Path) -> None:
    names = {name for path in site.glob("reference/*/index.html") for name in Page(path).names}
    public = {f"{package}.{name}" for package in PROMISED for name in import_module(package).__all__}
    assert public - names == set()
