"""What the pages of Ropewalk share: their look, light and dark, their keys, and how a value is shown.

A page is a folder `assets` with its `page.html`, `page.css` and scripts. It comes without a build step, and asks nobody
but its own server. Everything that it shows of others is text to it: `require-trusted-types-for` refuses the rest.
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
    """Return a file of a page, or of what pages share where the page has none of that name."""
    own = files(package) / "assets" / name
    return (own if own.is_file() else files(__name__) / "assets" / name).read_text(encoding="utf-8")


@lru_cache
def script(package: str, names: Sequence[str]) -> str:
    """Return the scripts of a page as one script without globals; each can use the ones before it."""
    parts = "\n".join(asset(package, f"{name}.js") for name in names)
    return f'"use strict";\n(() => {{\n{parts}\n}})();'


@lru_cache
def style(package: str) -> str:
    """Return the style of a page, behind that of all pages."""
    return asset(package, _BASE) + asset(package, "page.css")


def source_hash(text: str) -> str:
    """Return the source hash of an inline script or style for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
