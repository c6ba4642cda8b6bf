"""URI templates of resources: matches a URI and extracts its values."""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import unquote

from openenv_core.errors import ConfigurationError

MAX_ADDRESS_CHARS: Final = 8192
"""Maximum length of a URI to match: real URIs are shorter, and the time to match grows with the length."""


class _Value(NamedTuple):
    name: str
    slashes: bool


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
        self._parts: list[str | _Value] = []
        end = 0
        for match in re.finditer(r"\{(\+?)([A-Za-z_]\w*)(\*?)\}", template):
            self._parts += [template[end : match.start()], _Value(match[2], bool(match[1] or match[3]))]
            end = match.end()
        self._parts.append(template[end:])
        self.names = [segment.name for segment in self._parts if isinstance(segment, _Value)]
        texts = [segment for segment in self._parts if isinstance(segment, str)]
        if any("{" in text or "}" in text for text in texts):
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
        reached: list[set[int]] = [{0}]
        for segment in self._parts:
            reached.append(_find_ends(segment, uri, reached[-1]))
        end = len(uri)
        if end not in reached[-1]:
            return None
        values: dict[str, str] = {}
        for segment, starts in zip(reversed(self._parts), reversed(reached[:-1]), strict=True):
            start = _find_start(segment, uri, starts, end)
            if isinstance(segment, _Value):
                values[segment.name] = unquote(uri[start:end])
                if "/" in values[segment.name] and not segment.slashes:
                    return None
            end = start
        return {name: values[name] for name in self.names}


def _find_ends(segment: str | _Value, uri: str, starts: Iterable[int]) -> set[int]:
    """Return the positions where a segment that begins at one of `starts` can end."""
    if isinstance(segment, str):
        return {start + len(segment) for start in starts if uri.startswith(segment, start)}
    ends: set[int] = set()
    done = 0
    for start in sorted(starts):
        slash = -1 if segment.slashes else uri.find("/", start)
        last = len(uri) if slash < 0 else slash
        ends.update(range(max(start, done) + 1, last + 1))
        done = max(done, last)
    return ends


def _find_start(segment: str | _Value, uri: str, starts: Iterable[int], end: int) -> int:
    """Return the last of `starts` from which a segment can end at `end`."""
    if isinstance(segment, str):
        return end - len(segment)
    slash = -1 if segment.slashes else uri.rfind("/", 0, end)
    return max(start for start in starts if slash < start < end)
