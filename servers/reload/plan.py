"""What the supervisor tells the process that serves.

It travels in an environment variable, as tokens from outside do: the guard in between gives its child no other
descriptor than the socket.
"""

import dataclasses
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from servers.settings import ServerSettings

VARIABLE: Final = "ROPEWALK_RELOAD"

FAILED: Final = 2
"""The exit status of a server that could not be loaded; it has said why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadPlan:
    """One start of the server.

    Attributes:
        app: What to load.
        options: Options that were given and that only an application of create_app can heed.
        log_level: How much to print.
        settings: The server's settings.
        listener: The descriptor of the listening socket.
        again: Whether something was served before.
    """

    app: str
    options: tuple[str, ...]
    log_level: str
    settings: ServerSettings = field(repr=False)
    listener: int
    again: bool = False

    def text(self) -> str:
        """Return the plan as the variable's value."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> "ReloadPlan":
        """Take the plan out of the environment, for what the application starts should not have it."""
        found: dict[str, Any] = json.loads(environ.pop(VARIABLE))
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.pop("settings").items()
        }
        found["options"] = tuple(found["options"])
        return cls(settings=ServerSettings(**settings), **found)
