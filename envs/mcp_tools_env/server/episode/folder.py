"""The folder that a session's processes have to themselves, and what they get of an environment."""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..config.placeholders import placed
from ..config.servers import StdioServer
from ..upstream._guard import remove_tree

_PREFIX: Final = "ropewalk-mcp-"

PASSED: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Variables of the environment's server that every process gets: none of them holds a secret."""

_DEFAULTS: Final = {"PATH": os.defpath, "LANG": "C.UTF-8"}


class Folder:
    """A folder for this user alone, once it is made.

    Attributes:
        path: Where it is.
    """

    path: Path

    def make(self) -> None:
        """Make it, under a name that nobody can guess."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))

    def environment(self, server: StdioServer, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a server's process.

        Args:
            server: What its configuration adds, which comes last.
            environ: Those of the environment's server, of which a few are passed on.
        """
        home = str(self.path)
        passed = {name: environ[name] for name in (*PASSED, *server.ropewalk.env_pass) if name in environ}
        told = {name: placed(value, home) for name, value in server.env.items()}
        return {**_DEFAULTS, "HOME": home, "TMPDIR": home, **passed, **told}

    def command(self, server: StdioServer) -> tuple[str, ...]:
        """Return the program and its arguments."""
        return (placed(server.command, ""), *(placed(argument, str(self.path)) for argument in server.args))

    def cwd(self, server: StdioServer) -> Path:
        """Return where a server runs."""
        return self.path if server.cwd is None else Path(placed(server.cwd, str(self.path)))

    async def remove(self) -> None:
        """Remove it and all that is in it, where it was made."""
        if hasattr(self, "path"):
            await asyncio.to_thread(remove_tree, str(self.path))
