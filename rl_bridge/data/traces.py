"""Traces: whole chats with calls of tools, to be imitated. Recorded, kept as JSON lines, and made training rows.

A line has `messages` and `tools`, as chat templates take them. What an assistant said is there as text, its calls too;
it becomes tokens where a policy's tokenizer is known, by the same `Conversation` that rollouts are made of.
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
from rl_bridge.rollout.episode import require_play
from rl_bridge.rollout.task import Session
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.tokens.conversation import Conversation, training_rows
from rl_bridge.tokens.tool_calls import CLOSE, OPEN, THOUGHT_END, ToolCall
from rl_bridge.types import NO_VERSION, Completion, Ending, TrainSample, Trajectory, Turn

ASSISTANT = "assistant"
_CALL_KEYS = ("tool_calls", "function_call")
"""Where other data sets keep calls, beside the content."""

Call: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Calls a tool: its name and arguments, and what it gives."""

Solver: TypeAlias = Callable[[Any, Call], Awaitable[None]]
"""Plays an episode to its end, told its first observation and how to call tools."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """One chat, from its task to its last call.

    Attributes:
        tools: What the policy is told of, as chat templates take them.
        messages: In order. Those of the assistant are what is learned.
        reward: What it earned.
    """

    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[ChatMessage, ...]
    reward: float


class Recorder:
    """Plays one episode of a world of tools by hand, and keeps what a policy would have read and written."""

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
            rl_bridge.errors.EpisodeLostError: The environment says that its infrastructure failed. So may `call`.
        """
        result = await self._session.reset(seed=seed, **options)
        require_play(result)
        self._tools = tuple(await self._task.functions(self._session, result.observation))
        self._messages = list(self._task.messages(result.observation))
        self._reward, self._done = float(result.reward or 0.0), result.done
        return result.observation

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool, and return what it gave: its result, or the observation where that is none of tools.

        Raises:
            openenv_core.errors.ToolCallError: The call failed. That is recorded as any call is: the solver may go on.
        """
        call = ToolCall(name, arguments)
        self._messages.append({"role": ASSISTANT, "content": format_call(call)})
        result = await self._session.step(self._task.action(call))
        require_play(result)
        observation = result.observation
        self._reward += float(result.reward or 0.0)
        self._done = result.done
        if not self._done:
            content = self._task.result(observation)
            self._messages.append({"role": "tool", "name": name, "content": content})
        if not isinstance(observation, CallToolObservation):  # what ends an episode may be another
            return observation
        if (error := observation.error) is not None:
            raise ToolCallError(name, error.error_type, error.message, result)
        return observation.result

    def trace(self) -> Trace:
        """What has been recorded since `begin`; ValueError where the episode is not over."""
        if not self._done:
            raise ValueError("expected an episode that is over, got one that goes on; record it to its end")
        return Trace(tools=self._tools, messages=tuple(self._messages), reward=self._reward)


def format_call(call: ToolCall) -> str:
    """A call as Hermes and Qwen write it."""
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
    """Read traces; `tools` may be missing, and so may `reward`, which is 0 then.

    Raises:
        ConfigError: The file cannot be read, a line is no trace or has calls that are not written out in the content of
            a message, or there is no line.
    """
    try:
        # Not splitlines: a text may have ends of lines of its own, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
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
    # How a policy writes a call only its template tells: a call that is not text here would not be learned at all.
    if keys := [key for key in _CALL_KEYS if item.get(key)]:
        raise ConfigError(
            f"expected messages with their calls in the content, got one with {keys[0]} ({where}); write each call "
            "out in the content, as the policy's chat template would have it"
        )
    for key in ("role", "content"):
        if not isinstance(item[key], str):
            raise ConfigError(f"expected messages whose {key} is text, got {item[key]!r:.100} ({where})")
    message = ChatMessage(role=item["role"], content=item["content"])
    if item.get("name") is not None:  # a tool's: templates may show it
        message["name"] = item["name"]
    return message


def _starts_with_prompt(messages: Sequence[ChatMessage]) -> bool:
    roles = [message["role"] for message in messages]
    return ASSISTANT in roles[1:] and roles[0] != ASSISTANT


def samples_of(trace: Trace, tokenizer: ChatTokenizer, *, index: int) -> list[TrainSample]:
    """The training rows of a trace: its mask selects what the assistant wrote, with the token that ends an answer.

    Where the policy's template opens a thought, an answer without one begins by closing it. `index` is the trace's
    number in its batch.
    """
    first = next(place for place, message in enumerate(trace.messages) if message["role"] == ASSISTANT)
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
            # Behind a mark that opens a thought it would be one, which never ends, and calls nothing.
            content = f"\n{THOUGHT_END}\n\n{content}"
        turns.append(Turn(prompt=conversation.prompt, completion=_make_completion(tokenizer.answer(content))))
        new_messages = []
    trajectory = Trajectory(seed=0, turns=turns, ending=Ending.COMPLETED, reward=trace.reward)
    return training_rows(trajectory, advantage=1.0, index=index)


def _make_completion(tokens: Sequence[int]) -> Completion:
    """An answer that nobody sampled: its log-probabilities are unknown, and no loss of imitation asks for them."""
    return Completion(
        tokens=tokens, logprobs=[0.0] * len(tokens), versions=[NO_VERSION] * len(tokens), stopped=True
    )
