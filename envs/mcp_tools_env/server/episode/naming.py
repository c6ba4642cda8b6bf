"""What the tools of several servers are called in one list.

The tools of a server that is configured alone keep their names. Of several servers, each tool has its server's name
and two underscores in front: `files__read`, whether or not another server has a `read` too. So a name depends on the
configuration alone, never on which servers play or what another one lists at the moment.

A name is then made one that chat templates take: letters, digits, underscores and dashes, at most 64, and not what
clients call themselves. Where that changes it or two names meet, a few letters of a hash tell them apart.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Final

from openenv_core.tools import RESERVED_TOOL_NAMES

MAX_CHARS: Final = 64
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9_-]")
_HASH_CHARS: Final = 8
_RESERVED_PREFIX: Final = "tool_"


def prefix_of(server: str, prefix: str | None, servers: int) -> str:
    """Return what stands before the names of a server's tools.

    Args:
        server: Its name.
        prefix: What its configuration says.
        servers: How many are configured.
    """
    if prefix is not None:
        return prefix
    return f"{server}__" if servers > 1 else ""


def offered(tools: Iterable[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
    """Return servers and tools by the names that they are offered under.

    Args:
        tools: Server, prefix and name of each, in the order of the list.
    """
    wanted = [(f"{prefix}{name}", server, name) for server, prefix, name in tools]
    found: dict[str, tuple[str, str]] = {}
    changed = []
    # Names that may stay as they are come first, so that none of them gives way to one that is made up.
    for full, server, name in wanted:
        if _fits(full) and full not in found:
            found[full] = (server, name)
        elif found.get(full) != (server, name):
            changed.append((full, server, name))
    for full, server, name in changed:
        short = fitting(full)
        if short in found and found[short] != (server, name):
            short = _hashed(short, f"{server}\0{name}")
        found.setdefault(short, (server, name))
    order = {(server, name): place for place, (_, server, name) in reversed(list(enumerate(wanted)))}
    return dict(sorted(found.items(), key=lambda entry: order[entry[1]]))


def fitting(name: str) -> str:
    """Return a name that chat templates take; one that fits stays as it is."""
    if name in RESERVED_TOOL_NAMES:
        return f"{_RESERVED_PREFIX}{name}"
    plain = _FOREIGN.sub("_", name) or "_"
    return plain if len(plain) <= MAX_CHARS else _hashed(plain, name)


def _fits(name: str) -> bool:
    return fitting(name) == name


def _hashed(name: str, of: str) -> str:
    mark = hashlib.sha256(of.encode(errors="surrogatepass")).hexdigest()[:_HASH_CHARS]
    return f"{name[: MAX_CHARS - _HASH_CHARS - 1]}_{mark}"
