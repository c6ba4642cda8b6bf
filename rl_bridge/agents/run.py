"""What an agent gets of its episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rl_bridge.errors import MissingDependencyError
from rl_bridge.tokens.chat import ChatMessage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from rl_bridge.gateway.episode import ToolPort

MODEL: Final = "policy"
"""The model's name for agents; the gateway answers to any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """One episode, as its agent sees it.

    Attributes:
        messages: The chat that states the task.
        functions: The environment's tools, in the form that OpenAI's chat completions take.
        url: The gateway's URL, without `/v1`.
        key: The API key, which is valid until the episode ends.
        folder: An empty folder of the episode's own; removed when it ends.
        tools: The environment's tools.
        http: Connections for `openai`; None where there are none.
    """

    messages: Sequence[ChatMessage]
    functions: Sequence[Mapping[str, Any]]
    url: str
    key: str
    folder: Path
    tools: "ToolPort"
    http: Any = None

    @property
    def task(self) -> str:
        """The task as one text."""
        return "\n\n".join(message["content"] for message in self.messages)

    @property
    def mcp_url(self) -> str:
        """Where the environment's tools are an MCP server, under the same key."""
        return f"{self.url}/mcp"

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the environment; returns its result, or why it failed, as text."""
        return (await self.tools.call(name, arguments))[0]

    def openai(self) -> "AsyncOpenAI":
        """Return a client of the policy. All clients of a worker share their connections.

        Raises:
            MissingDependencyError: The package `openai` is not installed.
        """
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise MissingDependencyError.of_import(error) from error
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, http_client=self.http, timeout=None)

    def values(self) -> dict[str, str]:
        """Return what a program's arguments, variables and files may name in braces."""
        return {
            "task": self.task,
            "url": self.url,
            "key": self.key,
            "mcp_url": self.mcp_url,
            "model": MODEL,
            "folder": str(self.folder),
        }
