"""The ASGI app: `uvicorn envs.code_interpreter_env.server.app:app`."""

from openenv_core.tools import ToolObservation
from servers import create_app

from ..models import AnyAction, CodeInterpreterObservation, CodeInterpreterState
from .environment import CodeInterpreterEnvironment
from .shared import shared_backend

# An interpreter takes a few megabytes, and a trainer runs hundreds of episodes at once.
MAX_CONCURRENT_ENVS = 1024

app = create_app(
    CodeInterpreterEnvironment,
    AnyAction,
    CodeInterpreterObservation | ToolObservation,
    env_name="code_interpreter",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=CodeInterpreterState,
    lifespan=shared_backend().lifespan,
)
