"""Servers that run code for reward functions and tasks: who starts them says where they are, whoever needs one looks.

A server that is started again has another address, so what is handed on is a file, read at each call.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rl_bridge.errors import ConfigError

ENVIRONMENT_VARIABLE: Final = "ROPEWALK_CODERS"
"""In the processes of reward functions and rollout workers: the file with the addresses."""


def coders_file(folder: Path) -> Path:
    """The file of a run."""
    return folder.absolute() / "coders.json"


def tell_coders(file: Path, urls: Sequence[str]) -> None:
    """Write the addresses of the servers that serve now; a reader sees the old ones or the new ones."""
    written = file.with_suffix(".partial")
    written.write_text(json.dumps(list(urls)) + "\n", encoding="utf-8")
    written.replace(file)


def coder_urls() -> tuple[str, ...]:
    """Where code can be run now, for reward functions and tasks: addresses of `monarch.roles.coder`'s servers.

    Raises:
        ConfigError: The run has no such role.
    """
    file = os.environ.get(ENVIRONMENT_VARIABLE)
    if file is None:
        raise ConfigError(
            f"expected {ENVIRONMENT_VARIABLE} to name the file of addresses, it is not set; give the run "
            "monarch.roles.coder={replicas: 1}"
        )
    return tuple(json.loads(Path(file).read_text(encoding="utf-8")))
