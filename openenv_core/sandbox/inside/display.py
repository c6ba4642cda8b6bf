"""What code shows: values as bundles of mime types, within a bound."""

import base64
from collections.abc import Callable
from typing import Any, Final

METHODS: Final = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
)
"""The names under which classes say how they are shown, as notebooks know them."""

MAX_BUNDLES: Final = 256
"""Of one execution."""


class Shown:
    """The bundles of one execution.

    Args:
        limit: Bytes of all of them, and of the result, together.

    Attributes:
        truncated: Whether something was left out.
    """

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._bundles: list[tuple[str, dict[str, str]]] = []
        self.truncated = False

    @property
    def bundles(self) -> list[tuple[str, dict[str, str]]]:
        """What was shown, in order."""
        return self._bundles

    def text(self, text: str) -> str:
        """Return a text, cut to what is left of the bound."""
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        if size > self._left:
            self.truncated = True
            text = text.encode("utf-8", "replace")[: self._left].decode("utf-8", "ignore")
            size = self._left
        self._left -= size
        return text

    def add(self, kind: str, data: dict[str, str]) -> None:
        """Keep a bundle, or say that it was too large."""
        size = sum(len(value.encode("utf-8", "replace")) for value in data.values())
        if size > self._left or len(self._bundles) == MAX_BUNDLES:
            self.truncated = True
            return
        self._left -= size
        self._bundles.append((kind, data))

    def display(self, *values: Any) -> None:
        """Show values; code knows this as `display`."""
        for value in values:
            self.add("display_data", bundle(value, repr(value)))


def bundle(value: Any, text: str) -> dict[str, str]:
    """Return a value in every mime type that its class offers, and as text.

    Raises:
        Exception: Whatever the class's own methods raise.
    """
    data: dict[str, str] = {"text/plain": text}
    kind = type(value)
    if callable(several := getattr(kind, "_repr_mimebundle_", None)):
        made = several(value)
        made = made[0] if isinstance(made, tuple) else made
        data.update({str(mime): _plain(part) for mime, part in dict(made or {}).items() if part is not None})
        return data
    for mime, name in METHODS:
        method: Callable[[Any], Any] | None = getattr(kind, name, None)
        if callable(method) and (part := method(value)) is not None:
            data[mime] = _plain(part)
    return data


def _plain(part: Any) -> str:
    if isinstance(part, bytes | bytearray):
        return base64.b64encode(part).decode("ascii")
    return part if type(part) is str else str(part)
