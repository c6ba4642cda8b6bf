"""What a supervisor tells a worker: one line of JSON on its standard input, which tokens can travel by."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers.settings import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """One worker's part.

    Attributes:
        app: What to load.
        index: Which worker this is.
        workers: How many there are.
        listener: The descriptor of the socket that callers connect to.
        slots: The descriptor of the table of slots.
        ready: A descriptor to write a byte to once connections are accepted.
        supervisor: The process id of whoever removes the folder, while it lives.
        folder: Where the workers' private sockets are.
        options: Options that were given and that only an application of create_app can heed.
        log_level: How much to print.
        settings: The server's settings.
    """

    app: str
    index: int
    workers: int
    listener: int
    slots: int
    ready: int
    supervisor: int
    folder: str
    options: tuple[str, ...]
    log_level: str
    settings: ServerSettings = field(repr=False)

    def line(self) -> bytes:
        """Return the plan as one line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "WorkerPlan":
        """Return the plan in a line."""
        found: dict[str, Any] = json.loads(line)
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.pop("settings").items()
        }
        found["options"] = tuple(found["options"])
        return cls(settings=ServerSettings(**settings), **found)

    def private_socket(self, worker: int) -> str:
        """Return the path of a worker's private socket."""
        return str(Path(self.folder) / f"{worker}.sock")
