"""Shared parts of Ropewalk's pages: style (light and dark), keyboard shortcuts, and display of values.

A page is a folder `assets` with `page.html`, `page.css` and scripts. It needs no build step, and sends requests only to
its own server. It shows foreign data only as text, which `require-trusted-types-for` enforces.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final

_BASE: Final = "base.css"


@lru_cache
def asset(package: str, name: str) -> str:
    """Return a file of a page, or else the shared file of that name."""
    own = files(package) / "assets" / name
    return (own if own.is_file() else files(__name__) / "assets" / name).read_text(encoding="utf-8")


@lru_cache
def script(package: str, names: Sequence[str]) -> str:
    """Return the scripts of a page as one script without globals; each can use the ones before it."""
    parts = "\n".join(asset(package, f"{name}.js") for name in names)
    return f'"use strict";\n(() => {{\n{parts}\n}})();'


@lru_cache
def style(package: str) -> str:
    """Return the shared style, followed by that of a page."""
    return asset(package, _BASE) + asset(package, "page.css")


def source_hash(text: str) -> str:
    """Return the source hash of an inline script or style for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
