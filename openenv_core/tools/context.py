"""The context of a tool call: progress, log messages, and questions to the caller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from openenv_core.tools.wire import AskingUnavailableError

LogLevel: TypeAlias = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
"""Severities of messages to the caller, those of MCP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elicit:
    """Asks the caller's user to fill in a form.

    Attributes:
        message: What to show.
        schema: JSON schema of a flat object. The answer has `action` (accept, decline or cancel), and `content`
            where it was accepted.
    """

    message: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Asks the caller's language model.

    Attributes:
        messages: In MCP's own JSON (role, content), or the text of one user's message. The answer has `role`,
            `content`, `model` and `stopReason`.
        options: Further parameters in MCP's own JSON: systemPrompt, temperature, stopSequences.
    """

    messages: Sequence[Mapping[str, Any]] | str
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Roots:
    """Asks which folders the caller works in. The answer has `roots`, each with a `uri`."""


Request: TypeAlias = Elicit | Sample | Roots
"""What a tool can ask its caller for."""


class ToolContext:
    """What a tool is given for a parameter that is annotated with this class.

    This one is for calls that nobody listens to beside the result, those of a step: it says nothing to nobody.
    """

    @property
    def cancelled(self) -> bool:
        """Whether the caller has cancelled the call. Asynchronous tools are cancelled too; others can check this."""
        return False

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report the progress of the call. Never waits; callable from any thread.

        Args:
            progress: Grows from one time to the next.
            total: What it grows to, where that is known.
            message: In words.
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
        """Notify subscribers of a resource that it has changed."""

    async def ask(self, requests: Mapping[str, Request]) -> Mapping[str, Mapping[str, Any]]:
        """Ask the caller back; several questions at once.

        On the stateless wire of 2026-07-28 a server cannot ask. There the call ends, and the caller makes it again
        with the answers: the tool runs from its start, and gets this far with what it was answered. So ask before
        you change anything, and under names that are the same each time.

        Args:
            requests: Each under a name of its own.

        Returns:
            The answers in MCP's own JSON, each under the name of its question.

        Raises:
            AskingUnavailableError: The caller cannot be asked this.
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
"""The context of a call that is a step."""
