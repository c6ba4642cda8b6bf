"""Traces: whole chats with tool calls, to be imitated. Recorded, saved as JSON lines, and made into training rows.

A line has `messages` and `tools`, as chat templates take them. The assistant's messages and calls are stored as text
and tokenised once the policy's tokenizer is known, by the same `Conversation` that builds rollouts.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from openenv_core.errors import ToolCallError
from openenv_core.tools import CallToolObservation
from rl_bridge.data.examples import require_encodable
from rl_bridge.errors import ConfigError
from rl_bridge.rollout.episode import require_scored
from rl_bridge.rollout.task import Session
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.tokens.conversation import Conversation, training_rows
from rl_bridge.tokens.tool_calls import CLOSE, OPEN, THOUGHT_END, ToolCall
from rl_bridge.types import NO_VERSION, Completion, Ending, TrainSample, Trajectory, Turn

ASSISTANT = "assistant"
_CALL_KEYS = ("tool_calls", "function_call")
"""Keys in which other datasets keep calls, apart from the content."""

Call: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Calls a tool by name with arguments, and returns its result."""

Solver: TypeAlias = Callable[[Any, Call], Awaitable[None]]
"""Plays an episode to its end, given its first observation and a `Call`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """One chat, from its task to its last call.

    Attributes:
        tools: The tools that the policy may call, as chat templates take them.
        messages: The messages in order. The assistant's are what is learned.
        reward: The episode's reward.
    """

    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[ChatMessage, ...]
    reward: float


class Recorder:
    """Plays one episode of a world of tools, and records what a policy would have read and written."""

    def __init__(self, task: ToolTask, session: Session) -> None:
        self._task = task
        self._session = session
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._messages: list[ChatMessage] = []
        self._reward = 0.0
        self._done = False

    async def begin(self, seed: int, **options: Any) -> Any:
        """Begin the episode of a seed; returns its first observation.

        Raises:
            rl_bridge.errors.EpisodeLostError: The environment reports that its infrastructure failed; `call` raises
                it too.
        """
        result = await self._session.reset(seed=seed, **options)
        require_scored(result)
        self._tools = tuple(await self._task.functions(self._session, result.observation))
        self._messages = list(self._task.messages(result.observation))
        self._reward, self._done = float(result.reward or 0.0), result.done
        return result.observation

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool; returns its result, or the observation if that is not a tool call's.

        Raises:
            openenv_core.errors.ToolCallError: The call failed. It is recorded like any call; the solver may go on.
        """
        call = ToolCall(name, arguments)
        self._messages.append({"role": ASSISTANT, "content": format_call(call)})
        result = await self._session.step(self._task.action(call))
        require_scored(result)
        observation = result.observation
        self._reward += float(result.reward or 0.0)
        self._done = result.done
        if not self._done:
            content = self._task.result(observation)
            self._messages.append({"role": "tool", "name": name, "content": content})
        if not isinstance(observation, CallToolObservation):  # the last observation may be of another type
            return observation
        if (error := observation.error) is not None:
            raise ToolCallError(name, error.error_type, error.message, result)
        return observation.result

    def trace(self) -> Trace:
        """Return what was recorded since `begin`; ValueError if the episode is not over."""
        if not self._done:
            raise ValueError("expected an episode that is over, got one that goes on; record it to its end")
        return Trace(tools=self._tools, messages=tuple(self._messages), reward=self._reward)


def format_call(call: ToolCall) -> str:
    """Format a call as Hermes and Qwen write it."""
    return (
        f"{OPEN}\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n{CLOSE}"
    )


def save_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write traces as JSON lines."""
    lines = (
        json.dumps(
            {"messages": trace.messages, "tools": trace.tools, "reward": trace.reward}, ensure_ascii=False
        )
        for trace in traces
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def load_traces(path: Path) -> list[Trace]:
    """Read traces; `tools` is optional, and so is `reward`, by default 0.

    Raises:
        ConfigError: The file cannot be read or is empty, a line is not a trace, or a message has calls outside of its
            content.
    """
    try:
        # Not splitlines, which would also split at line breaks within texts, such as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected traces in {str(path)!r}, cannot read it: {error}") from error
    traces = [
        _parse_trace(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not traces:
        raise ConfigError(f"expected at least one trace in {str(path)!r}, got none")
    return traces


def _parse_trace(line: str, where: str) -> Trace:
    try:
        item = json.loads(line)
        messages = tuple(_parse_message(message, where) for message in item["messages"])
        trace = Trace(
            tools=tuple(item.get("tools", ())), messages=messages, reward=float(item.get("reward", 0.0))
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"expected an object with messages of role and content, got {line!r:.100} ({where}): {error!r}"
        ) from error
    require_encodable((messages, trace.tools), where)
    if not _starts_with_prompt(messages):
        raise ConfigError(
            f"expected messages that begin with another's and have one of the {ASSISTANT}'s, got "
            f"{[message['role'] for message in messages]} ({where})"
        )
    return trace


def _parse_message(item: Mapping[str, Any], where: str) -> ChatMessage:
    # Only the policy's template knows how it writes a call: one that is not text here would not be learned at all.
    if keys := [key for key in _CALL_KEYS if item.get(key)]:
        raise ConfigError(
            f"expected messages with their calls in the content, got one with {keys[0]} ({where}); write each call "
            "out in the content, as the policy's chat template would have it"
        )
    for key in ("role", "content"):
        if not isinstance(item[key], str):
            raise ConfigError(f"expected messages whose {key} is text, got {item[key]!r:.100} ({where})")
    message = ChatMessage(role=item["role"], content=item["content"])
    if item.get("name") is not None:  # the tool's name, which templates may show
        message["name"] = item["name"]
    return message


def _starts_with_prompt(messages: Sequence[ChatMessage]) -> bool:
    roles = [message["role"] for message in messages]
    return ASSISTANT in roles[1:] and roles[0] != ASSISTANT


def samples_of(trace: Trace, tokenizer: ChatTokenizer, *, index: int) -> list[TrainSample]:
    """Return the training rows of a trace; their mask selects the assistant's tokens, end-of-answer tokens included.

    If the policy's template opens a thought, an answer without one begins by closing it.

    Args:
        trace: The trace.
        tokenizer: The policy's tokenizer and chat template.
        index: The trace's index in its batch.
    """
    first = next(position for position, message in enumerate(trace.messages) if message["role"] == ASSISTANT)
    conversation = Conversation(tokenizer, trace.messages[:first], trace.tools)
    turns: list[Turn] = []
    new_messages: list[ChatMessage] = []
    for message in trace.messages[first:]:
        if message["role"] != ASSISTANT:
            new_messages.append(message)
            continue
        if turns:
            conversation.append_turn(turns[-1].completion.tokens, new_messages)
        content = message["content"]
        if tokenizer.opens_thought(conversation.prompt) and THOUGHT_END not in content:
            # After an opened thought the whole answer would be part of it, and its calls would not count.
            content = f"\n{THOUGHT_END}\n\n{content}"
        turns.append(Turn(prompt=conversation.prompt, completion=_make_completion(tokenizer.answer(content))))
        new_messages = []
    trajectory = Trajectory(seed=0, turns=turns, ending=Ending.COMPLETED, reward=trace.reward)
    return training_rows(trajectory, advantage=1.0, index=index)


def _make_completion(tokens: Sequence[int]) -> Completion:
    """Return an answer that was not sampled; its log-probabilities are unknown, and imitation does not use them."""
    return Completion(
        tokens=tokens, logprobs=[0.0] * len(tokens), versions=[NO_VERSION] * len(tokens), stopped=True
    )
