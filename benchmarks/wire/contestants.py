"""The measured servers, and how each is started."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.wire.processes import ROOT, Server, free_port

DEFAULT_RELEASED_PYTHON: Final = ROOT / ".venvs" / "released-0.10.0" / "bin" / "python"

_APPS: Final = "benchmarks/wire/apps"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server with one kind of environment.

    Attributes:
        name: Name in the measurements.
        command: Command that starts it; `{port}` is replaced by the port.
        ours: Whether it runs in this installation.
        health: Whether it has a /health.
        metrics: Whether its metrics are on, if it has any.
    """

    name: str
    command: tuple[str, ...]
    ours: bool = True
    health: bool = True
    metrics: bool = True

    def start(self, core: int | None) -> Server:
        """Start it on a free port.

        Raises:
            StartError: The server did not start.
        """
        port = free_port()
        # Without PYTHONPATH the released package cannot import ours; a fixed hash seed removes a difference between
        # rounds.
        env = {"PYTHONPATH": str(ROOT) if self.ours else "", "PYTHONHASHSEED": "0"}
        env["ROPEWALK_METRICS"] = str(int(self.metrics))
        return Server([word.format(port=port) for word in self.command], port, env, core, health=self.health)


def ours(kind: str, *, metrics: bool = True) -> Contestant:
    """Return our server as `ropewalk serve` runs it, or the same without metrics."""
    command = (sys.executable, "-m", "openenv_core.cli", "serve", f"benchmarks.wire.apps.ours:{kind}")
    name = f"ours, {kind}" if metrics else f"ours, {kind}, no metrics"
    return Contestant(name, (*command, "--port", "{port}", "--log-level", "warning"), metrics=metrics)


def floor(kind: str = "plain") -> Contestant:
    """Return the floor: an echo on the stack that our server is built on."""
    command = (sys.executable, "-m", "uvicorn", f"benchmarks.wire.apps.floor:{kind}", "--port", "{port}")
    settings = ("--ws", "websockets-sansio", "--ws-per-message-deflate", "false", "--log-level", "warning")
    return Contestant("floor" if kind == "plain" else f"floor, {kind}", (*command, *settings))


def released(python: Path, kind: str) -> Contestant:
    """Return the released server as its documentation runs it."""
    command = (str(python), "-m", "uvicorn", "--app-dir", _APPS, f"released:{kind}", "--port", "{port}")
    return Contestant(f"released, {kind}", (*command, "--log-level", "warning"), ours=False)


def below_asgi() -> Contestant:
    """Return the echo on a WebSocket stack below ASGI."""
    command = (sys.executable, "-m", "benchmarks.wire.apps.below_asgi", "{port}")
    return Contestant("below ASGI", command, health=False)
