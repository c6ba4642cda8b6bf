"""URI templates of resources: matches a URI and extracts its values."""

import re
from typing import Final
from urllib.parse import unquote

from openenv_core.errors import ConfigurationError

MAX_ADDRESS_CHARS: Final = 8192
"""Maximum length of a URI to match: real URIs are shorter, and the time to match grows with the length."""


class UriTemplate:
    """A URI template as in RFC 6570: `{name}` is a value without slashes, `{+name}` one that may have them.

    Args:
        template: The template's text; without values, a single URI.

    Raises:
        ConfigurationError: It has other expressions in braces, or a name twice.

    Attributes:
        names: Names of the values.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        # A text, and for each value its three groups and the text after it.
        parts = re.split(r"\{(\+?)([A-Za-z_]\w*)(\*?)\}", template)
        self._texts, self.names = parts[::4], parts[2::4]
        self._slashes = [bool(plus or star) for plus, star in zip(parts[1::4], parts[3::4], strict=True)]
        if any("{" in text or "}" in text for text in self._texts):
            raise ConfigurationError(
                f"expected values like {{name}}, or {{+name}} for one with slashes, got the address {template!r}"
            )
        if len(set(self.names)) < len(self.names):
            raise ConfigurationError(f"expected values with names of their own, got the address {template!r}")

    def match(self, uri: str) -> dict[str, str] | None:
        """Return the values in a URI; None if it does not match.

        If there are several matches, earlier values are the longest possible. Values are percent-decoded; a URI does
        not match if that gives a slash in a `{name}`, which authors rely on when they open files.
        """
        if len(uri) > MAX_ADDRESS_CHARS:
            return None
        # Tries what a backtracking regular expression would, but each position only once.
        first, *texts = self._texts
        reached = [{len(first)} if uri.startswith(first) else set()]
        for slashes, text in zip(self._slashes, texts, strict=True):
            ends = _find_ends(uri, reached[-1], slashes)
            reached.append({end + len(text) for end in ends if uri.startswith(text, end)})
        end = len(uri)
        if end not in reached[-1]:
            return None
        values: dict[str, str] = {}
        for number, name in reversed(list(enumerate(self.names))):
            end -= len(texts[number])
            slash = -1 if self._slashes[number] else uri.rfind("/", 0, end)
            start = max(start for start in reached[number] if slash < start < end)
            values[name] = unquote(uri[start:end])
            if "/" in values[name] and not self._slashes[number]:
                return None
            end = start
        return {name: values[name] for name in self.names}


def _find_ends(uri: str, starts: set[int], slashes: bool) -> set[int]:
    """Return the positions where a value that begins at one of `starts` can end."""
    ends: set[int] = set()
    is_inside = False
    for position, character in enumerate(uri):
        is_inside = (is_inside or position in starts) and (slashes or character != "/")
        if is_inside:
            ends.add(position + 1)
    return ends
