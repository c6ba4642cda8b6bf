"""A trivial tool in an environment of ours: `benchmarks.mcp.ours:app`."""

from openenv_core import Observation, State
from openenv_core.tools import ToolAction, ToolEnvironment, ToolObservation, tool
from servers import create_app


class Adder(ToolEnvironment[State]):
    """An adder that counts its calls."""

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._calls = 0

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        """Set the count to 0."""
        self._calls = 0
        return Observation()

    @property
    def state(self) -> State:
        """The number of calls."""
        return State(step_count=self._calls)

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self._calls += 1
        return a + b


app = create_app(Adder, ToolAction, ToolObservation, env_name="adder", max_concurrent_envs=256)
