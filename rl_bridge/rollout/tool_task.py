"""Tasks whose actions are tool calls, and the default task of a run that names none."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from openenv_core import MCPToolClient, Observation, ValidationFailedError
from openenv_core.tools import CallToolAction, CallToolObservation, ListToolsAction, ListToolsObservation
from openenv_core.tools.specs import openai_tools
from rl_bridge.errors import ConfigError, EpisodeLostError, RolloutError
from rl_bridge.rollout.episode import require_scored
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Session, Task
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.tokens.conversation import Conversation
from rl_bridge.tokens.tool_calls import CallStyle, ToolCall, UnparsableCall, parse_tool_calls
from rl_bridge.types import Completion, Ending


class ToolDialogue:
    """A growing chat with tool calls; see `rl_bridge.rollout.task.Dialogue`."""

    def __init__(
        self,
        task: "ToolTask",
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
        self._results: list[tuple[ToolCall | None, Any]] = []

    def prompt(self) -> Sequence[int] | None:
        """Return the chat so far; None if there is no room for an answer after it."""
        if self._answer is not None:
            messages = [self._to_message(*result) for result in self._results]
            if not self._policy.may_have_room(self._conversation.prompt, messages):
                return None
            self._conversation.append_turn(self._answer.tokens, messages, stopped=self._answer.stopped)
            self._answer, self._results = None, []
        prompt = self._conversation.prompt
        return prompt if self._policy.has_room(prompt) else None

    def read(self, completion: Completion, text: str) -> Sequence[Any] | Ending:
        """Return the actions of the answer's tool calls; one that was cut midway is never repaired."""
        self._answer = completion
        tokenizer = self._policy.tokenizer
        calls = parse_tool_calls(
            tokenizer.decode_written(completion.tokens),
            style=self._style,
            functions=self._conversation.functions,
            repair=self._repair and completion.stopped,
            in_thought=tokenizer.opens_thought(self._conversation.prompt),
        )
        if isinstance(calls, UnparsableCall):
            return Ending.UNPARSABLE_CALL
        self._calls = iter(calls)
        actions = [self._task.action(call) for call in calls] or [self._task.parse(text)]
        return Ending.ILLEGAL if any(action is None for action in actions) else actions

    def add_observation(self, observation: Any) -> None:
        """Take the observation of the next call, or of an answer without a call.

        It is turned into text only when the policy reads it: an episode's last observation may not be a tool's.
        """
        call = next(self._calls, None)
        self.tool_calls += call is not None
        self._results.append((call, observation))

    def _to_message(self, call: ToolCall | None, observation: Any) -> ChatMessage:
        content = self._task.result(observation)
        if call is None:
            return {"role": "user", "content": content}
        return {"role": "tool", "name": call.name, "content": content}


_PAYLOAD_KEYS: Final = {
    "text": "text",
    "image": "data",
    "audio": "data",
    "resource": "resource",
    "resource_link": "uri",
}
"""The key that holds the payload of each type of MCP content block."""


class ToolTask(Task):
    """Presents an environment of tools to a language model.

    The prompt lists the tools and the task; each tool call of an answer is a step, and its result the next message.
    The chat grows, so an episode is one training row (`rl_bridge.tokens.conversation`). An answer without a call goes
    to `parse`.
    """

    chat_grows = True
    _remedy = ""

    def messages(self, observation: Any) -> list[ChatMessage]:
        """Return the chat that an episode begins with: the `task` of the first observation.

        Raises:
            RolloutError: The observation has no `task`; override this method then.
        """
        task = getattr(observation, "task", None)
        if not isinstance(task, str):
            raise self._make_error("a first observation with a text as its task", observation, "messages")
        return [{"role": "user", "content": task}]

    def parse(self, text: str) -> Any | None:
        """Return the action of an answer without a call; None, the default, if it is none, which ends the episode."""
        return None

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        """Return the tools to show to the policy, in the form that chat templates take.

        By default all tools that the environment lists. Listing them does not count as a step of the episode.

        Args:
            session: The session, after its reset.
            observation: The first observation.

        Raises:
            rl_bridge.errors.EpisodeLostError: The environment reports that its infrastructure failed, or lists no
                tools.
            RolloutError: The environment does not support listing tools; override this method then.
        """
        if not isinstance(observation, ListToolsObservation):
            try:
                list_result = await session.step(ListToolsAction())
            except ValidationFailedError as error:
                raise self._make_error("an environment that lists its tools", error, "functions") from error
            require_scored(list_result)
            observation = list_result.observation
        if not isinstance(observation, ListToolsObservation):
            raise self._make_error("a list of tools", observation, "functions")
        if not observation.tools:  # how released environments report a failure to list tools
            reason = observation.metadata.get("error", "it does not say why")
            raise EpisodeLostError(f"expected the environment to list its tools, got none: {reason}")
        return openai_tools(observation.tools)

    def action(self, call: ToolCall) -> Any | None:
        """Return the action of a tool call; None if it is none, which ends the episode as illegal.

        By default every call is an action: the environment reports unknown tools and wrong arguments to the policy.
        """
        return CallToolAction(tool_name=call.name, arguments=dict(call.arguments))

    def result(self, observation: Any) -> str:
        """Return a call's result as text: a string as it is, MCP content as its texts, anything else as JSON.

        Raises:
            RolloutError: The observation is not that of a tool call; override this method then.
        """
        if not isinstance(observation, CallToolObservation):
            raise self._make_error("what a call gave", observation, "result")
        if observation.error is not None:
            return f"error: {observation.error.message}"
        return _to_text(observation.result)

    async def begin(self, session: Session, policy: ChatPolicy, observation: Any) -> ToolDialogue:
        """See `Task.begin`.

        Raises:
            rl_bridge.errors.ConfigError: Neither the chat template nor `model.tool_calls` says how tool calls are
                written.
        """
        return ToolDialogue(
            self,
            policy,
            policy.converse(self.messages(observation), await self.functions(session, observation)),
            style=self._style(policy),
            repair=self.config.model.repair_tool_calls,
        )

    def _make_error(self, expected: str, got: object, method: str) -> RolloutError:
        fields = ", ".join(type(got).model_fields) if isinstance(got, Observation) else got
        return RolloutError(
            f"expected {expected}, got {type(got).__name__} ({fields}); "
            f"override {type(self).__name__}.{method}{self._remedy}"
        )

    def _style(self, policy: ChatPolicy) -> CallStyle:
        if self.config.model.tool_calls != "auto":
            return CallStyle(self.config.model.tool_calls)
        if (style := policy.tokenizer.call_style) is None:
            raise ConfigError(
                "expected a chat template that defines how tool calls are written, as Hermes' or Llama's do, got one "
                "that does not; set model.tool_calls to hermes, llama or xml, whichever the checkpoint was trained to"
            )
        return style


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_content, value)):
        return "\n".join(
            str(block["text"]) if block["type"] == "text" else f"[{block['type']}]" for block in value
        )
    return json.dumps(value, ensure_ascii=False)


def _is_content(block: Any) -> bool:
    """Whether it is an MCP content block. A policy that reads text only sees the type of images and audio."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    return isinstance(kind, str) and _PAYLOAD_KEYS.get(kind) in block


class ToolWorldTask(ToolTask):
    """The task of any environment whose actions are tool calls and whose first observation has a textual `task`."""

    client_type = MCPToolClient
    _remedy = (
        " in a task of this environment's own, and name that by rollout.task, which is not set "
        "(docs/tutorials/train.md)"
    )
