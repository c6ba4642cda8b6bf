"""Renders the page of a run's rollouts: one file, which needs no server and no network."""

import html
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from openenv_core import pages

SCRIPTS = (
    *("elements", "theme", "shortcuts", "records", "chat", "tokens", "turns", "heading", "filters", "links"),
    *("list", "found", "reading", "steps", "controls", "keys", "main"),
)
"""The page's scripts in their order; each uses those before it."""
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def script() -> str:
    """Return all scripts as one."""
    return pages.script(__package__, SCRIPTS)


def policy() -> str:
    """Return the content security policy: our script and style alone, and nothing from anywhere."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{pages.source_hash(script())}'",
            f"style-src '{pages.source_hash(pages.style(__package__))}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def render_page(run: Path, records: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the page of a run, with its records embedded, in parts."""
    title = run.absolute().name
    values = {
        "title": html.escape(title),
        "folder": html.escape(str(run.absolute())),
        "policy": html.escape(policy()),
        "style": pages.style(__package__),
        "script": script(),
        "settings": _escape_markup(json.dumps({"title": title}).encode()).decode(),
    }
    for index, piece in enumerate(_PLACEHOLDER.split(pages.asset(__package__, "page.html"))):
        if index % 2 == 0:
            yield piece.encode()
        elif piece == "records":
            yield from map(_escape_markup, records)
        else:
            # A folder's name may contain bytes that are not valid UTF-8.
            yield values[piece].encode(errors="replace")


def _escape_markup(line: bytes) -> bytes:
    r"""Make JSON safe to embed in HTML: `<` occurs only in strings, where `\u003c` means the same."""
    return line.replace(b"<", rb"\u003c")
