"""An environment with a lifespan. `app` writes what happens to the file named by NOTES."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from counter import Add, Count, Counter

from openenv_core.errors import ConfigurationError
from servers import create_app
from servers.app import EnvironmentApp


class Telling(Counter):
    def close(self) -> None:
        note("session closed")


def note(text: str) -> None:
    with open(os.environ["NOTES"], "a", encoding="utf-8") as notes:
        notes.write(f"{text}\n")


@asynccontextmanager
async def lifespan(app: EnvironmentApp) -> AsyncIterator[None]:
    note(f"start exposed={app.settings.exposed}")
    if os.environ.get("REFUSE"):
        raise ConfigurationError("expected a better place, got this one; go elsewhere")
    if os.environ.get("BREAK"):
        raise RuntimeError("nobody meant this")
    yield
    note("end")


app = create_app(Telling, Add, Count, max_concurrent_envs=4, lifespan=lifespan)
