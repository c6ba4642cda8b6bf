"""URLs in messages."""

from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit


def shown(url: str) -> str:
    """Return a URL as messages have it: without user, password and query, which may be secrets."""
    with suppress(ValueError):  # brackets without an end, or a port that is no number
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0:
            return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    # Perhaps the password has a character that ought to be quoted: nothing in front of the last @ is shown.
    _, at, rest = url.rpartition("@")
    return ("...@" if at else "") + rest.partition("?")[0]
