"""The state of an episode; actions and observations are the core's tool actions and observations."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from openenv_core import State


class ServerInfo(BaseModel):
    """One tool server of an episode.

    Attributes:
        name: The server's name in the configuration.
        title: The name that the server reports.
        version: The version that the server reports.
        protocol: The negotiated MCP version.
        instructions: The server's instructions for using its tools.
        tools: The number of tools it offers.
        calls: The number of calls made to it.
        restarts: How often it was restarted after it had died.
        dead: Why it is currently unusable; None if it is usable.
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
        tool: The requested tool name.
        arguments: The requested arguments, or the beginning of their JSON if that is long.
        outcome: "ok", or the `ToolErrorType` of the failure.
        result: The beginning of the result, or of the error message, as text.
        started_s: Start time in seconds since the reset.
        seconds: Duration in seconds.
        metadata: The observation's metadata: a restart, a truncated result, an exhausted budget.
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
    """The state of an episode.

    Attributes:
        servers: The tool servers of the episode.
        calls: The number of calls made, including failed ones.
        calls_left: The number of calls left in the episode.
        time_left_s: The seconds left in the episode, as of the last call.
        done: Whether the episode has ended.
        ended: Why it ended; None while it is running.
        transcript: The calls in order; only the most recent ones if there were too many.
        transcript_dropped: The number of entries dropped from the beginning of the transcript.
    """

    servers: list[ServerInfo] = Field(default_factory=list)
    calls: int = 0
    calls_left: int = 0
    time_left_s: float = 0.0
    done: bool = False
    ended: Literal["calls", "time", "infrastructure"] | None = None
    transcript: list[TranscriptEntry] = Field(default_factory=list)
    transcript_dropped: int = 0
