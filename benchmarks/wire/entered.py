"""Functions and files of ours that one warm step enters, on both ends: python -m benchmarks.wire.entered [--list].

Client and server share a process, so that `sys.setprofile` sees both. The author's environment does not count.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import uvicorn

from benchmarks.wire import ours
from openenv_core import EnvClient, State
from servers.hosting import SETTINGS

ROOT: Final = Path(__file__).resolve().parents[2]
_OURS: Final = tuple(f"{ROOT / package}/" for package in ("openenv_core", "servers"))


class Client(EnvClient[ours.Message, ours.Echo, State]):
    """A client of the trivial environment."""

    action_type = ours.Message
    observation_type = ours.Echo


_WARM_STEPS: Final = 20
_START_POLL_INTERVAL_S: Final = 0.01


class Entered:
    """The functions of ours that threads enter while it is on, in that order."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, None] = {}

    def __enter__(self) -> "Entered":
        sys.setprofile(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            self.codes.setdefault(frame.f_code)

    @property
    def files(self) -> set[str]:
        """Paths of the files that have these functions."""
        return {str(Path(code.co_filename).relative_to(ROOT)) for code in self.codes}


async def measure(app: Any, transport: str, options: dict[str, Any]) -> Entered:
    """Return what one step over a transport enters."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(_START_POLL_INTERVAL_S)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with Client(base_url=url, transport=transport) as client:
            await client.reset()
            for _ in range(_WARM_STEPS):
                await client.step(ours.Message(message="hello"))
            with Entered() as entered:
                await client.step(ours.Message(message="hello"))
            return entered
    finally:
        server.should_exit = True
        await serving


def main() -> None:
    """Print a row for each transport, and the functions with `--list`."""
    rows: list[tuple[str, str, dict[str, Any], Callable[[], Any]]] = [
        ("WebSocket, ropewalk serve", "websocket", SETTINGS, lambda: ours.inline),
        ("WebSocket, uvicorn", "websocket", {}, lambda: ours.inline),
        ("HTTP, ropewalk serve", "http", SETTINGS, lambda: ours.inline),
    ]
    for name, transport, options, app in rows:
        entered = asyncio.run(measure(app(), transport, options))
        print(f"{name}: {len(entered.codes)} functions, {len(entered.files)} files")
        if "--list" in sys.argv:
            for code in entered.codes:
                print(f"  {Path(code.co_filename).relative_to(ROOT)}: {code.co_qualname}")


if __name__ == "__main__":
    main()
