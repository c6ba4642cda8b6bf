"""A store whose shelves hold different goods, and a question about them."""

import random
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeAlias
from uuid import uuid4

from pydantic import Field

from openenv_core.errors import EpisodeOverError
from openenv_core.tools import ToolEnvironment, ToolResult, prompt, resource, tool

from ..models import PlaceHolderObservation, PlaceHolderState

Shelf: TypeAlias = Literal["north", "east", "south", "west"]
SHELVES: Final[tuple[Shelf, ...]] = ("north", "east", "south", "west")
GOODS = ("apples", "bells", "candles", "drums", "easels", "flutes")
MAX_STEPS = 20

# Drawn seeds must be exact in JSON readers that parse integers as doubles.
_DRAWN_SEED_BITS = 53


class PlaceHolderEnvironment(ToolEnvironment[PlaceHolderState]):
    """How many of one good are on all shelves together? There are tools to look and to answer, and 20 calls.

    The seed determines the goods on the shelves and the question, so the same seed and calls give the same episode.
    """

    # The methods never wait and take microseconds, so a server may run them on its event loop.
    BLOCKING = False
    # The seed and the actions determine the episode.
    DETERMINISTIC = True
    # Instances share nothing, so one process can hold many sessions.
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._store: dict[Shelf, dict[str, int]] = {}
        self._wanted = ""
        self._right: bool | None = None
        self._state = PlaceHolderState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> PlaceHolderObservation:
        """Fill the shelves and draw a question.

        Args:
            seed: Determines the task; None draws a seed, which `state` then has.
            episode_id: The caller's name for the episode; None draws a UUID.
        """
        if seed is None:
            seed = secrets.randbits(_DRAWN_SEED_BITS)
        source = random.Random(seed)
        self._store = {
            shelf: {good: source.randint(1, 99) for good in sorted(source.sample(GOODS, 3))}
            for shelf in SHELVES
        }
        self._wanted = source.choice(GOODS)
        self._right = None
        self._state = PlaceHolderState(
            episode_id=str(uuid4()) if episode_id is None else episode_id, seed=seed
        )
        return PlaceHolderObservation(task=self.task(), calls_left=MAX_STEPS)

    @property
    def state(self) -> PlaceHolderState:
        """The state of the episode: a copy, so that callers cannot change the task."""
        return self._state.model_copy()

    # The tools: their types and docstrings are shown to callers.

    @tool
    def list_shelves(self) -> list[Shelf]:
        """List the shelves of the store."""
        return list(SHELVES)

    @tool
    def look(self, shelf: Annotated[Shelf, Field(description="the shelf to look at")]) -> dict[str, int]:
        """Tell what lies on one shelf, and how many of each."""
        return dict(self._store[shelf])

    @tool
    def submit(
        self,
        total: Annotated[
            int, Field(ge=0, le=1_000_000, description="how many there are on all shelves together")
        ],
    ) -> str:
        """Give the answer. This ends the episode."""
        right = sum(goods.get(self._wanted, 0) for goods in self._store.values())
        self._right = total == right
        return "right" if self._right else f"wrong: there are {right}"

    # An agent that calls the tools over MCP does not see the reset's observation; it reads the task here.

    @resource("task://current")
    @prompt
    def task(self) -> str:
        """What is to be done with the tools."""
        return f"How many {self._wanted} lie on all shelves together? Look, then submit the total."

    # Called around every call, failed ones included.

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Refuse calls outside an episode."""
        if self._state.seed is None:
            raise EpisodeOverError("expected reset() before the first call, got a call; call reset() first")
        if self._state.done:
            raise EpisodeOverError

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Count the call, and set its reward."""
        state = self._state
        state.step_count += 1
        state.done = self._right is not None or state.step_count == MAX_STEPS
        cut_off = state.done and self._right is None
        return replace(result, reward=float(self._right is True), done=state.done, truncated=cut_off)
