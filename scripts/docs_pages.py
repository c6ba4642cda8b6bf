"""MkDocs hooks: adds pages outside docs/, and rewrites links that are written for a forge."""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "envs/**/README.md", "examples/**/README.md")
HOME = {"README.md": "index.md"}
"""Pages by path in the repository, with their paths on the site."""


def list_outside_pages() -> dict[str, str]:
    """Return the pages outside docs/: paths in the repository, with their paths on the site."""
    paths = (path.relative_to(ROOT).as_posix() for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern)))
    return HOME | {path: path for path in paths}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File

    for path, name in list_outside_pages().items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links within the repository to links within the site; links to other files become text."""
    pages = list_outside_pages()
    page_path = page.file.src_uri
    source = next((path for path, name in pages.items() if name == page_path), f"docs/{page_path}")

    def rewrite_link(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        path = os.path.normpath(PurePosixPath(source).parent / target)
        if not (ROOT / path).exists():
            return link[0]  # MkDocs reports it
        if (ROOT / path).is_dir():
            path += "/README.md"
        name = path.removeprefix("docs/") if path.startswith("docs/") else pages.get(path)
        if name is None:
            return text
        return f"{picture}[{text}]({os.path.relpath(name, PurePosixPath(page_path).parent)}{anchor or ''})"

    return LINK.sub(rewrite_link, markdown)
