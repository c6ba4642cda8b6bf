"""A store whose shelves hold different goods, and a question about them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from openenv_core.tools import ToolEnvironment, ToolResult, prompt, resource, tool

from ..models import PlaceHolderObservation

Shelf: TypeAlias = Literal["north", "east", "south", "west"]
SHELVES: Final[tuple[Shelf, ...]] = ("north", "east", "south", "west")
GOODS = ("apples", "bells", "candles", "drums", "easels", "flutes")
MAX_STEPS = 20


class PlaceHolderEnvironment(ToolEnvironment):
    """How many of one good are on all shelves together? There are tools to look and to answer, and 20 calls.

    The seed determines the goods on the shelves and the question, so the same seed and calls give the same episode.
    """

    # The methods never wait and take microseconds, so a server may run them on its event loop.
    BLOCKING = False
    # The seed and the actions determine the episode.
    DETERMINISTIC = True

    def reset(self) -> PlaceHolderObservation:
        """Fill the shelves and draw a question."""
        self._store: dict[Shelf, dict[str, int]] = {
            shelf: {good: self.rng.randint(1, 99) for good in sorted(self.rng.sample(GOODS, 3))}
            for shelf in SHELVES
        }
        self._wanted = self.rng.choice(GOODS)
        self._right: bool | None = None
        return PlaceHolderObservation(task=self.task(), calls_left=MAX_STEPS)

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

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Set the reward of a call, failed ones included, and end the episode."""
        answered = self._right is not None
        cut_off = not answered and self.state.step_count == MAX_STEPS
        return replace(result, reward=float(self._right is True), done=answered or cut_off, truncated=cut_off)
