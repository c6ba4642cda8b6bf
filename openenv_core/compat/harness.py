"""The released types of a coding agent's sessions, on which environments for such agents are built."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from openenv_core.tools import Tool

Message: TypeAlias = dict[str, Any]
"""A chat message as a dict, with `role` and `content` among its fields."""


@dataclass
class ToolResult:
    """The result of a tool call.

    Attributes:
        data: The value.
        done: Whether the rollout is over.
        metadata: Additional data.
        error: Why there is no value.
    """

    data: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class VerifyResult:
    """The outcome of a rollout.

    Attributes:
        env_reward: The environment's reward; None if it gave none.
        done: Whether the episode is over.
        metrics: Metrics by name.
        artifacts: Artifacts by name.
    """

    env_reward: float | None = None
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)


class ResourceSession(ABC):
    """The session of one rollout of an agent."""

    @abstractmethod
    def initial_messages(self) -> list[Message]:
        """Return the agent's first messages."""

    @abstractmethod
    def list_tools(self) -> list[Tool]:
        """Return the available tools."""

    @abstractmethod
    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool."""

    @abstractmethod
    def verify(self, transcript: Sequence[Message], final_state: Any | None = None) -> VerifyResult:
        """Return the outcome of the rollout after the agent has stopped."""

    @abstractmethod
    def close(self) -> None:
        """Release the session's resources."""


SessionT = TypeVar("SessionT", bound=ResourceSession)


class ResourceSessionFactory(ABC, Generic[SessionT]):
    """Creates sessions that are isolated from each other."""

    @abstractmethod
    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> SessionT:
        """Return a new session."""
