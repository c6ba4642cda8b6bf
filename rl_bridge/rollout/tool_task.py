"""A task whose actions are calls of tools, and the one of a run that names none."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from openenv_core import MCPToolClient, Observation, ValidationFailedError
from openenv_core.tools import CallToolAction, CallToolObservation, ListToolsAction, ListToolsObservation
from openenv_core.tools.specs import openai_tools
from rl_bridge.errors import ConfigError, EpisodeLostError, RolloutError
from rl_bridge.rollout.episode import require_play
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Session, Task
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.tokens.conversation import Conversation
from rl_bridge.tokens.tool_calls import CallStyle, ToolCall, UnparsableCall, parse_tool_calls
from rl_bridge.types import Completion, Ending


class ToolDialogue:
    """See `rl_bridge.rollout.task.Dialogue`."""

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
        """The chat so far; None where an answer would not fit behind it."""
        if self._answer is not None:
            messages = [self._to_message(*result) for result in self._results]
            if not self._policy.may_have_room(self._conversation.prompt, messages):
                return None
            self._conversation.append_turn(self._answer.tokens, messages)
            self._answer, self._results = None, []
        prompt = self._conversation.prompt
        return prompt if self._policy.has_room(prompt) else None

    def read(self, completion: Completion, text: str) -> Sequence[Any] | Ending:
        """The actions that the calls mean. An answer that was cut off means nothing: what it lacks nobody knows."""
        if not completion.stopped:
            return Ending.TRUNCATED_LENGTH
        self._answer = completion
        tokenizer = self._policy.tokenizer
        calls = parse_tool_calls(
            tokenizer.decode_written(completion.tokens),
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
        self._results.append((call, observation))

    def _to_message(self, call: ToolCall | None, observation: Any) -> ChatMessage:
        content = self._task.result(observation)
        if call is None:
            return {"role": "user", "content": content}
        return {"role": "tool", "name": call.name, "content": content}


_CARRIES: Final = {
    "text": "text",
    "image": "data",
    "audio": "data",
    "resource": "resource",
    "resource_link": "uri",
}
"""Under which key each kind of MCP's content has what it carries."""


class ToolTask(Task):
    """A world of tools as a language model sees it.

    The policy is told the tools and the task, and answers; its calls are steps; what they gave are the next messages.
    The chat grows, so an episode is one training row (`rl_bridge.tokens.conversation`). An answer that calls nothing is
    what `parse` makes of it.
    """

    chat_grows = True
    _remedy = ""

    def messages(self, observation: Any) -> list[ChatMessage]:
        """The chat that an episode begins with: what the first observation has as its `task`.

        Raises:
            RolloutError: It has none; then this is to be overridden.
        """
        task = getattr(observation, "task", None)
        if not isinstance(task, str):
            raise self._fault("a first observation with a text as its task", observation, "messages")
        return [{"role": "user", "content": task}]

    def parse(self, text: str) -> Any | None:
        """The action that an answer without a call means; None, as here, where none: then it ends the episode."""
        return None

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        """The tools that the policy is told of, as chat templates take them.

        By default all that the environment lists. To ask it is no step of the episode.

        Args:
            session: After its reset.
            observation: The first.

        Raises:
            rl_bridge.errors.EpisodeLostError: The environment says that its infrastructure failed, or has no tools now.
            RolloutError: It does not list tools; then this is to be overridden.
        """
        if not isinstance(observation, ListToolsObservation):
            try:
                listed = await session.step(ListToolsAction())
            except ValidationFailedError as error:
                raise self._fault("an environment that lists its tools", error, "functions") from error
            require_play(listed)
            observation = listed.observation
        if not isinstance(observation, ListToolsObservation):
            raise self._fault("a list of tools", observation, "functions")
        if not observation.tools:  # released environments say so where they could not list them, and why
            reason = observation.metadata.get("error", "it does not say why")
            raise EpisodeLostError(f"expected the environment to list its tools, got none: {reason}")
        return openai_tools(observation.tools)

    def action(self, call: ToolCall) -> Any | None:
        """The action that a call means; None where it means none: then it ends the episode as illegal.

        By default any call is an action: whether there is such a tool, and what it takes, the environment says, and the
        policy reads it.
        """
        return CallToolAction(tool_name=call.name, arguments=dict(call.arguments))

    def result(self, observation: Any) -> str:
        """What the policy is told that a call gave: a text as it is, content of several kinds as its texts, else JSON.

        Raises:
            RolloutError: It is no observation of tools; then this is to be overridden.
        """
        if not isinstance(observation, CallToolObservation):
            raise self._fault("what a call gave", observation, "result")
        if observation.error is not None:
            return f"error: {observation.error.message}"
        return _shown(observation.result)

    async def begin(self, session: Session, policy: ChatPolicy, observation: Any) -> ToolDialogue:
        """See `Task.begin`.

        Raises:
            rl_bridge.errors.ConfigError: The chat template does not say how calls are written, and neither does
                `model.tool_calls`.
        """
        return ToolDialogue(
            self,
            policy,
            policy.converse(self.messages(observation), await self.functions(session, observation)),
            style=self._style(policy),
            repair=self.config.model.repair_tool_calls,
        )

    def _fault(self, expected: str, got: object, method: str) -> RolloutError:
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
                "expected a chat template that tells how calls of tools are written, as Hermes' or Llama's do, got one "
                "that does not; set model.tool_calls to hermes or llama, whichever the checkpoint was trained to"
            )
        return style


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_content, value)):
        return "\n".join(
            str(block["text"]) if block["type"] == "text" else f"[{block['type']}]" for block in value
        )
    return json.dumps(value, ensure_ascii=False)


def _is_content(block: Any) -> bool:
    """Whether it is a block of MCP's content. Of pictures and sound a policy that reads text is told the kind alone."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    return isinstance(kind, str) and _CARRIES.get(kind) in block


class ToolWorldTask(ToolTask):
    """Any environment whose actions are calls of tools and whose first observation has its task in words."""

    client_type = MCPToolClient
    _remedy = (
        " in a task of this environment's own, and name that by rollout.task, which is not set "
        "(docs/tutorials/train.md)"
    )
