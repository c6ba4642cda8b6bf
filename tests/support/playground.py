"""Environments to play in a terminal: one whose actions have all kinds of fields, one of tools."""

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, Field

from openenv_core import Action, Environment, EpisodeOverError, Observation, State
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from servers import create_app


class Speed(StrEnum):
    SLOW = "slow"
    FAST = "fast"


class Place(BaseModel):
    x: int
    y: int = 0


class Move(Action):
    """Goes somewhere."""

    kind: Literal["move"] = "move"
    steps: int = Field(ge=1, le=9, description="how far")
    speed: Speed = Speed.SLOW
    loud: bool = False
    weight: float | None = None
    path: list[int] = Field(default_factory=list)
    place: Place | None = None
    note: str = ""


class Seen(Observation):
    text: str
    told: dict[str, Any] = Field(default_factory=dict)


class Field_(Environment[Move, Seen, State]):  # noqa: N801 - pydantic's Field has the name
    """Echoes its actions; nine steps end the episode."""

    DETERMINISTIC = True
    BLOCKING = False

    def __init__(self) -> None:
        self._state = State()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, far: int = 0) -> Seen:
        self._state = State(episode_id=episode_id)
        return Seen(text=f"seed {seed}, far {far} \x1b]0;a title\x07\x1b[2J")

    def step(self, action: Move) -> Seen:
        if self._state.step_count >= 9:
            raise EpisodeOverError
        if action.note == "raise":
            raise RuntimeError("as it was told")
        self._state.step_count += action.steps
        return Seen(
            text=f"went {action.steps}",
            told=action.model_dump(mode="json"),
            reward=0.5,
            done=self._state.step_count >= 9,
        )

    @property
    def state(self) -> State:
        return self._state


ADD = {
    "type": "object",
    "description": "Adds two numbers.",
    "properties": {
        "a": {"type": "integer", "description": "one number", "minimum": -9, "maximum": 9},
        "b": {"type": "integer", "default": 1, "minimum": -9, "maximum": 9},
    },
    "required": ["a"],
}


class Tools(Environment[ListToolsAction | CallToolAction, Observation, State]):
    """Adds, and greets."""

    DETERMINISTIC = True
    BLOCKING = False

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def step(self, action: ListToolsAction | CallToolAction) -> Observation:
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(
                tools=[
                    Tool(name="add", description="Adds two numbers.", input_schema=ADD),
                    Tool(name="greet", description="Says hello.", input_schema={"type": "object"}),
                ]
            )
        if action.tool_name == "greet":
            return CallToolObservation(tool_name="greet", result="hello")
        if action.tool_name == "add":
            result = action.arguments["a"] + action.arguments.get("b", 1)
            return CallToolObservation(tool_name="add", result=result, reward=result)
        why = ToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message=action.tool_name)
        return CallToolObservation(tool_name=action.tool_name, error=why)

    @property
    def state(self) -> State:
        return State()


fields_app = create_app(Field_, Move, Seen, env_name="fields")
tools_app = create_app(
    Tools,
    ListToolsAction | CallToolAction,
    ListToolsObservation | CallToolObservation | Observation,
    env_name="tools",
)
