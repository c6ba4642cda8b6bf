"""The ASGI app: `ropewalk serve harbor PATH`, or `uvicorn envs.harbor_env.server.app:app` with HARBOR_TASKS."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openenv_core.tools import ToolObservation
from servers import create_app

from ..models import AnyAction, HarborObservation, HarborState
from .environment import HarborEnvironment, shared_machines, shared_tasks

# A session takes a container, or up to two gigabytes in a sandbox.
MAX_CONCURRENT_ENVS = 64


@asynccontextmanager
async def _lifespan(app: object) -> AsyncIterator[None]:
    shared_tasks()  # report missing tasks at start-up, not to the first client
    async with shared_machines().lifespan(app):
        yield


app = create_app(
    HarborEnvironment,
    AnyAction,
    HarborObservation | ToolObservation,
    env_name="harbor",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=HarborState,
    lifespan=_lifespan,
)
