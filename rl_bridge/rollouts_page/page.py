"""Puts the page together: markup, style, script, and what it shows."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

SCRIPTS = (
    "elements",
    "records",
    "chat",
    "tokens",
    "turns",
    "heading",
    "filters",
    "links",
    "list",
    "found",
    "reading",
    "steps",
    "controls",
    "theme",
    "keys",
    "main",
)
"""In the order in which they stand on the page; each uses what comes before it."""
SERVED_RECORDS = "records.jsonl"
"""Where the page finds its records, where they do not stand in it."""

_HOLE = re.compile(r"\{\{(\w+)\}\}")


@lru_cache
def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@lru_cache
def script() -> str:
    """All scripts as one, which leaves no names behind."""
    parts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();'


def policy(*, served: bool) -> str:
    """The content security policy: this script, this style, and nothing from anywhere, but the records of a server."""
    records = "'self'" if served else "'none'"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_sha256(script())}'",
            f"style-src '{_sha256(_asset('page.css'))}'",
            "img-src data:",
            f"connect-src {records}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def served_page(run: Path) -> bytes:
    """The page of a run, for a server that has the records at `SERVED_RECORDS`."""
    return b"".join(_fill(run, served=True, records=()))


def whole_page(run: Path, records: Iterable[bytes]) -> Iterator[bytes]:
    """The page of a run with its records in it, part by part.

    Args:
        run: Its folder.
        records: Lines of JSON.
    """
    return _fill(run, served=False, records=records)


def _fill(run: Path, *, served: bool, records: Iterable[bytes]) -> Iterator[bytes]:
    title = run.absolute().name
    settings = {"title": title, "served": SERVED_RECORDS if served else None}
    holes = {
        "title": html.escape(title),
        "folder": html.escape(str(run.absolute())),
        "policy": html.escape(policy(served=served)),
        "style": _asset("page.css"),
        "script": script(),
        "settings": _inert(json.dumps(settings).encode()).decode(),
    }
    for place, part in enumerate(_HOLE.split(_asset("page.html"))):
        if place % 2 == 0:
            yield part.encode()
        elif part == "records":
            yield from map(_inert, records)
        else:
            # A folder's name may be bytes that are no text.
            yield holes[part].encode(errors="replace")


def _inert(line: bytes) -> bytes:
    r"""JSON that ends no element of HTML: `<` stands in strings alone, where `\u003c` means the same."""
    return line.replace(b"<", rb"\u003c")


def _sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
