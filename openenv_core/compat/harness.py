"""The released types of sessions that a coding agent works in: what an environment of such agents is built on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from openenv_core.tools import Tool

Message: TypeAlias = dict[str, Any]
"""A chat message by its fields, `role` and `content` among them."""


@dataclass
class ToolResult:
    """What a tool of a session gave.

    Attributes:
        data: The value.
        done: Whether the rollout is over.
        metadata: Anything else.
        error: Why there is no value.
    """

    data: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class VerifyResult:
    """How a rollout ended.

    Attributes:
        env_reward: The environment's own reward; None where it gave none.
        done: Whether its episode is over.
        metrics: Figures by name.
        artifacts: What it leaves behind, by name.
    """

    env_reward: float | None = None
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)


class ResourceSession(ABC):
    """What one rollout of an agent works with."""

    @abstractmethod
    def initial_messages(self) -> list[Message]:
        """Return the agent's first messages."""

    @abstractmethod
    def list_tools(self) -> list[Tool]:
        """Return the tools that there are."""

    @abstractmethod
    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool."""

    @abstractmethod
    def verify(self, transcript: Sequence[Message], final_state: Any | None = None) -> VerifyResult:
        """Return how the rollout ended, once the agent has stopped."""

    @abstractmethod
    def close(self) -> None:
        """Release the session's resources."""


SessionT = TypeVar("SessionT", bound=ResourceSession)


class ResourceSessionFactory(ABC, Generic[SessionT]):
    """Makes sessions, each apart from the others."""

    @abstractmethod
    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> SessionT:
        """Return a new session."""
