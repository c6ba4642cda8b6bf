"""One episode of calls: a conversation that grows by what the policy wrote and by what its calls gave."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.chat import Message
from rl_bridge.tokens.conversation import Conversation
from rl_bridge.tokens.tool_calls import CallStyle, ToolCall, UnparsableCall, parse_tool_calls
from rl_bridge.types import Completion, Ending


class Meanings(Protocol):
    """What a `ToolTask` says of calls, and of answers without one."""

    def action(self, call: ToolCall) -> Any | None:
        """The action that a call means."""

    def parse(self, text: str) -> Any | None:
        """The action that an answer without a call means."""

    def result(self, observation: Any) -> str:
        """What the policy is told that a call gave."""


class ToolDialogue:
    """See `rl_bridge.rollout.task.Dialogue`.

    Args:
        task: Says what calls mean.
        policy: Who plays.
        conversation: As it begins.
        style: How the policy writes calls.
        repair: Whether JSON that is almost right is mended.
    """

    def __init__(
        self,
        task: Meanings,
        policy: ChatPolicy,
        conversation: Conversation,
        *,
        style: CallStyle,
        repair: bool,
    ) -> None:
        self.tool_calls = 0
        self._task = task
        self._policy = policy
        self._conversation = conversation
        self._style = style
        self._repair = repair
        self._answer: Completion | None = None
        self._calls: Iterator[ToolCall] = iter(())
        self._heard: list[tuple[ToolCall | None, Any]] = []

    def prompt(self) -> Sequence[int] | None:
        """The chat so far; None where an answer would not fit behind it."""
        if self._answer is not None:
            told = [self._told(*heard) for heard in self._heard]
            if not self._policy.may_have_room(self._conversation.prompt, told):
                return None
            self._conversation.go_on(self._answer.tokens, told)
            self._answer, self._heard = None, []
        prompt = self._conversation.prompt
        return prompt if self._policy.has_room(prompt) else None

    def read(self, completion: Completion, text: str) -> Sequence[Any] | Ending:
        """The actions that the calls mean. An answer that was cut off means nothing: what it lacks nobody knows."""
        if not completion.stopped:
            return Ending.TRUNCATED_LENGTH
        self._answer = completion
        tokenizer = self._policy.tokenizer
        calls = parse_tool_calls(
            tokenizer.written(completion.tokens),
            style=self._style,
            repair=self._repair,
            in_thought=tokenizer.opens_thought(self._conversation.prompt),
        )
        if isinstance(calls, UnparsableCall):
            return Ending.UNPARSABLE_CALL
        self._calls = iter(calls)
        actions = [self._task.action(call) for call in calls] or [self._task.parse(text)]
        return Ending.ILLEGAL if any(action is None for action in actions) else actions

    def hear(self, observation: Any) -> None:
        """What a call gave; or what an answer without one was told.

        It is made words when the policy is to read it: what ends an episode may be no tool's observation.
        """
        call = next(self._calls, None)
        self.tool_calls += call is not None
        self._heard.append((call, observation))

    def _told(self, call: ToolCall | None, observation: Any) -> Message:
        said = self._task.result(observation)
        if call is None:
            return {"role": "user", "content": said}
        return {"role": "tool", "name": call.name, "content": said}
