"""A store whose shelves hold different goods, and a question about them."""

import random
import secrets
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from openenv_core import Environment
from openenv_core.errors import EpisodeOver
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    ToolError,
    ToolErrorType,
)

from ..models import PlaceHolderAction, PlaceHolderAnswer, PlaceHolderObservation, PlaceHolderState
from .tools import ARGUMENTS, SHELVES, Call, ListShelves, Look, Shelf, tools

GOODS = ("apples", "bells", "candles", "drums", "easels", "flutes")
MAX_STEPS = 20

# Seeds that are drawn here must survive a JSON reader whose integers are doubles.
_DRAWN_SEED_BITS = 53


class PlaceHolderEnvironment(Environment[PlaceHolderAction, Any, PlaceHolderState]):
    """How many of one good lie on all shelves together? There are tools to look and to answer, and 20 steps.

    The seed decides what lies where and what is asked for, so the same seed and calls give the same episode.
    """

    # The methods never wait and take microseconds, so that a server may run them on its event loop.
    BLOCKING = False
    # The seed and the actions decide everything.
    DETERMINISTIC = True
    # Instances share nothing, so that one process can hold many sessions.
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._store: dict[Shelf, dict[str, int]] = {}
        self._wanted = ""
        self._state = PlaceHolderState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> PlaceHolderObservation:
        """Fill the shelves and ask.

        Args:
            seed: Decides the task; None draws a fresh seed, which `state` then tells.
            episode_id: The caller's name for the episode; None makes a uuid4.
        """
        if seed is None:
            seed = secrets.randbits(_DRAWN_SEED_BITS)
        source = random.Random(seed)
        self._store = {
            shelf: {good: source.randint(1, 99) for good in sorted(source.sample(GOODS, 3))}
            for shelf in SHELVES
        }
        self._wanted = source.choice(GOODS)
        self._state = PlaceHolderState(
            episode_id=str(uuid4()) if episode_id is None else episode_id, seed=seed
        )
        return PlaceHolderObservation(
            task=f"How many {self._wanted} lie on all shelves together? Look, then submit the total.",
            calls_left=MAX_STEPS,
        )

    def step(self, action: PlaceHolderAction) -> PlaceHolderAnswer:
        """List the tools, or run one. A call that cannot be made is a step too, and its answer says why.

        Raises:
            EpisodeOver: There is no episode under way.
        """
        state = self._state
        if state.seed is None:
            raise EpisodeOver("expected reset() before the first step(), got step(); call reset() first")
        if state.done:
            raise EpisodeOver
        state.step_count += 1
        answer = self._list() if isinstance(action, ListToolsAction) else self._call(action)
        state.done = answer.done = answer.done or state.step_count == MAX_STEPS
        return answer

    @property
    def state(self) -> PlaceHolderState:
        """Where the episode stands: a copy, so that the holder of it cannot change the task."""
        return self._state.model_copy()

    def _list(self) -> PlaceHolderAnswer:
        return ListToolsObservation(tools=tools(), reward=0.0)

    def _call(self, action: CallToolAction) -> PlaceHolderAnswer:
        name = action.tool_name
        if (model := ARGUMENTS.get(name)) is None:
            there_are = f"expected one of the tools {', '.join(ARGUMENTS)}, got {name!r}"
            return _failed(name, ToolErrorType.TOOL_NOT_FOUND, there_are)
        try:
            call = model.model_validate(action.arguments)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc']) or 'arguments'}: {fault['msg']}"
                for fault in error.errors()
            )
            return _failed(name, ToolErrorType.INVALID_ARGS, faults)
        return self._run(name, call)

    def _run(self, name: str, call: Call) -> PlaceHolderAnswer:
        if isinstance(call, ListShelves):
            return CallToolObservation(tool_name=name, result=list(SHELVES), reward=0.0)
        if isinstance(call, Look):
            return CallToolObservation(tool_name=name, result=dict(self._store[call.shelf]), reward=0.0)
        right = sum(goods.get(self._wanted, 0) for goods in self._store.values())
        return CallToolObservation(
            tool_name=name,
            result="right" if call.total == right else f"wrong: there are {right}",
            reward=float(call.total == right),
            done=True,
        )


def _failed(name: str, kind: ToolErrorType, message: str) -> CallToolObservation:
    return CallToolObservation(
        tool_name=name, error=ToolError(error_type=kind, message=message[:500]), reward=0.0
    )
