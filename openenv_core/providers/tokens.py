"""The variables that tell a server of ours its tokens, read by who starts one and asks it for its health."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

TOKENS: Final = "ROPEWALK_TOKENS"
TOKEN_FILE: Final = "ROPEWALK_TOKEN_FILE"

MOST_CHARS: Final = 65_536
"""How much of a file is read: callers of a sandbox service name the file too."""


def first_token(environ: Mapping[str, str], folder: str | Path = ".") -> str | None:
    """Return the first token of a server with these variables; None where they name none that can be read.

    Args:
        environ: The server's.
        folder: The server's working directory.
    """
    found = environ.get(TOKENS, "").replace(",", " ").split()
    name = environ.get(TOKEN_FILE, "").strip()
    if not found and name and (file := Path(folder, name)).is_file():
        # Where it cannot be read, the server says so itself.
        with suppress(OSError, ValueError), file.open(encoding="utf-8") as opened:
            lines = [line.strip() for line in opened.read(MOST_CHARS).splitlines()]
            found = [line for line in lines if line and not line.startswith("#")]
    return found[0] if found else None
