"""The context of a tool call: progress, log messages, and questions to the caller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from openenv_core.tools.wire import AskingUnavailableError

LogLevel: TypeAlias = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
"""MCP's severities of log messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elicit:
    """Asks the caller's user to fill in a form.

    Attributes:
        message: The message to show.
        schema: JSON schema of a flat object. The answer has `action` (accept, decline or cancel) and, if accepted,
            `content`.
    """

    message: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Asks the caller's language model.

    Attributes:
        messages: Messages as MCP's JSON (role, content), or the text of one user message. The answer has `role`,
            `content`, `model` and `stopReason`.
        options: Further parameters as MCP's JSON: systemPrompt, temperature, stopSequences.
    """

    messages: Sequence[Mapping[str, Any]] | str
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Roots:
    """Asks which folders the caller works in. The answer has `roots`, each with a `uri`."""


Request: TypeAlias = Elicit | Sample | Roots
"""A question of a tool to its caller."""


class ToolContext:
    """Passed to a tool for a parameter annotated with this class.

    This implementation is for calls by `step`, where only the result reaches the caller: it discards everything.
    """

    @property
    def cancelled(self) -> bool:
        """Whether the caller has cancelled the call. Asynchronous tools are cancelled too; others can check this."""
        return False

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report the progress of the call. Never waits; callable from any thread.

        Args:
            progress: Increases with each report.
            total: Final value of `progress`, if known.
            message: Description of the progress.
        """

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        """Send a log message to the caller. Never waits; callable from any thread."""

    def tools_changed(self) -> None:
        """Notify subscribers that the list of tools has changed."""

    def resources_changed(self) -> None:
        """Notify subscribers that the list of resources has changed."""

    def prompts_changed(self) -> None:
        """Notify subscribers that the list of prompts has changed."""

    def resource_updated(self, uri: str) -> None:
        """Notify subscribers that a resource has changed."""

    async def ask(self, requests: Mapping[str, Request]) -> Mapping[str, Mapping[str, Any]]:
        """Ask the caller one or more questions.

        In the stateless protocol of 2026-07-28 a server cannot send requests. There the call ends, and the caller
        repeats it with the answers: the tool runs again from its start, and `ask` returns the answers. So ask before
        you change anything, and use the same names each time.

        Args:
            requests: The questions by name.

        Returns:
            The answers as MCP's JSON, by the names of their questions.

        Raises:
            AskingUnavailableError: The caller does not support this question.
        """
        raise AskingUnavailableError(
            "expected a caller that can be asked back, got a step; call the tool over MCP, or let it do without"
        )

    async def elicit(
        self, message: str, schema: Mapping[str, Any], name: str = "elicit"
    ) -> Mapping[str, Any]:
        """Ask the caller's user to fill in a form; see `Elicit` and `ask`."""
        return (await self.ask({name: Elicit(message=message, schema=schema)}))[name]

    async def sample(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        max_tokens: int,
        name: str = "sample",
        **options: Any,
    ) -> Mapping[str, Any]:
        """Ask the caller's language model; see `Sample` and `ask`."""
        request = Sample(messages=messages, max_tokens=max_tokens, options=options)
        return (await self.ask({name: request}))[name]

    async def roots(self, name: str = "roots") -> Mapping[str, Any]:
        """Ask which folders the caller works in; see `Roots` and `ask`."""
        return (await self.ask({name: Roots()}))[name]


SILENT = ToolContext()
"""The context of calls by `step`."""
