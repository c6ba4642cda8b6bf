"""The state of an episode; actions and observations are the core's tool actions and observations."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from openenv_core import State


class ServerInfo(BaseModel):
    """One tool server of an episode.

    Attributes:
        name: As it is configured.
        title: What it calls itself.
        version: Likewise.
        protocol: The version of MCP that is spoken with it.
        instructions: How its tools are to be used, by its own account.
        tools: How many it offers.
        calls: How many were made to it.
        restarts: How often it has died and was started anew.
        dead: Why it is of no use at the moment.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    title: str = ""
    version: str = ""
    protocol: str = ""
    instructions: str = ""
    tools: int = 0
    calls: int = 0
    restarts: int = 0
    dead: str | None = None


class TranscriptEntry(BaseModel):
    """One call of an episode.

    Attributes:
        tool: As it was asked for.
        arguments: Likewise; the beginning of their JSON where that is long.
        outcome: "ok", or how the call failed: a value of `ToolErrorType`.
        result: The beginning of what it returned, or of why it failed, as text.
        started_s: Seconds since the reset.
        seconds: What it took.
        metadata: What the observation said beside: a restart, a cut, a budget.
    """

    model_config = ConfigDict(extra="forbid")

    tool: str
    arguments: dict[str, Any] | str
    outcome: str
    result: str
    started_s: float
    seconds: float
    metadata: dict[str, Any] = Field(default_factory=dict)


class McpToolsState(State):
    """Where an episode stands.

    Attributes:
        servers: Those that play.
        calls: How many were made, those that failed included.
        calls_left: How many the episode has left.
        time_left_s: How many seconds, as of the last call.
        done: It has ended.
        ended: Why.
        transcript: What was called, in order; where it was too long, its end.
        transcript_dropped: How many entries are missing at its beginning.
    """

    servers: list[ServerInfo] = Field(default_factory=list)
    calls: int = 0
    calls_left: int = 0
    time_left_s: float = 0.0
    done: bool = False
    ended: Literal["calls", "time", "infrastructure"] | None = None
    transcript: list[TranscriptEntry] = Field(default_factory=list)
    transcript_dropped: int = 0
