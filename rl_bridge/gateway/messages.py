"""Requests and replies of a language model, the same for all dialects, and the keys by which chats are recognised."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

from rl_bridge.errors import BridgeError
from rl_bridge.tokens.chat import ChatMessage


class GatewayError(BridgeError):
    """A request that is answered with an error.

    Attributes:
        status: The HTTP status.
        code: What is wrong, in one word of the dialects' own, for clients that read it.
    """

    def __init__(self, message: str, *, status: int = HTTPStatus.BAD_REQUEST, code: str = "invalid_request"):
        super().__init__(message)
        self.status = status
        self.code = code


TOO_LONG: Final = "context_length_exceeded"
"""The code for a chat that leaves no room for an answer; agents that know it compact their context."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a tool, in a message."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of a chat.

    Attributes:
        role: system, user, assistant or tool.
        content: Its text. Thoughts are no part of it: clients may send them back or not.
        calls: The calls in a message of the assistant.
        name: The tool that a message of the role `tool` is from; empty if it is unknown.
        call_id: The id of the call that a message of the role `tool` answers.
    """

    role: str
    content: str
    calls: tuple[FunctionCall, ...] = ()
    name: str = ""
    call_id: str = ""

    def for_template(self) -> ChatMessage:
        """Return it in the form that chat templates take."""
        message: ChatMessage = {"role": self.role, "content": self.content}
        if self.name:
            message["name"] = self.name
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request for one answer.

    Attributes:
        messages: The chat, which does not end with the assistant's message.
        functions: The tools that the policy is told of, in the form that chat templates take.
        max_tokens: The most tokens of the answer, if the client sets a limit.
        digest: A hash of the whole body, by which a retry is recognised.
    """

    messages: Sequence[Message]
    functions: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stream: bool
    model: str
    digest: bytes
    options: Mapping[str, Any]
    """Settings that only the dialect's reply needs."""

    def keys(self) -> list[bytes]:
        """Return a key of each beginning of the chat: of the tools alone, then with one message more each."""
        keys = [_hash(b"", json.dumps(self.functions, ensure_ascii=False, sort_keys=True))]
        for message in self.messages:
            keys.append(extend_key(keys[-1], message))
        return keys


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    CALLS = "calls"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What is known of a reply before its answer is sampled.

    Attributes:
        id: A random id, to which dialects add a prefix.
        created: When the request came, in seconds since 1970.
        prompt_tokens: All tokens of the prompt.
        cached_tokens: Those that the calls before it have.
    """

    id: str
    created: int
    model: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer of the policy, as dialects encode it."""

    head: ReplyHead
    text: str
    thought: str
    calls: tuple[FunctionCall, ...]
    finish: Finish
    completion_tokens: int

    def as_message(self) -> Message:
        """Return it as the message that a client sends back."""
        return Message(role="assistant", content=self.text, calls=self.calls)


def extend_key(key: bytes, message: Message) -> bytes:
    """Return the key of a chat with one message more.

    Of the assistant's messages, spaces around the text, the calls' ids and how numbers are written do not count, as
    clients change all three.
    """
    if message.role != "assistant":
        return _hash(key, json.dumps([message.role, message.content], ensure_ascii=False))
    calls = [[call.name, _normalize(call.arguments)] for call in message.calls]
    written = [message.role, message.content.strip(), calls]
    return _hash(key, json.dumps(written, ensure_ascii=False, sort_keys=True))


def _normalize(value: Any) -> Any:
    """Return JSON with all numbers as a client in JavaScript has them."""
    if isinstance(value, Mapping):
        return {name: _normalize(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) + 0.0  # without the sign of zero
        except OverflowError:
            return str(value)
    return value


def _hash(key: bytes, text: str) -> bytes:
    return hashlib.blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def join_messages(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages that a chat begins with, and neighbouring messages of the assistant.

    Templates take one system message, and some dialects split an answer into several messages.
    """
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else None
        opening = message.role == "system" and len(joined) == 1
        if before is not None and before.role == message.role and (message.role == "assistant" or opening):
            separator = "\n\n" if before.content and message.content else ""
            content = f"{before.content}{separator}{message.content}"
            joined[-1] = Message(role=message.role, content=content, calls=before.calls + message.calls)
        else:
            joined.append(message)
    return joined


class CallNames:
    """The names of the calls in a chat by their ids, as results of tools may name only the id."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add(self, calls: Sequence[FunctionCall]) -> None:
        """Remember calls."""
        self._names |= {call.id: call.name for call in calls}

    def make_result(self, call_id: object, content: str, name: str = "") -> Message:
        """Return the message of a call's result; `name` is the tool's if the chat has no such call."""
        found = self._names.get(str(call_id), name)
        return Message(role="tool", content=content, name=found, call_id=str(call_id))


def make_request(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    functions: Sequence[Mapping[str, Any]],
    max_tokens: object,
    **options: Any,
) -> ModelRequest:
    """Make the request of a body that a dialect has read.

    Raises:
        GatewayError: The chat has no message to answer.
    """
    joined = join_messages(messages)
    if all(message.role == "system" for message in joined) or joined[-1].role == "assistant":
        raise GatewayError(
            "expected a chat that ends with a message to answer, got "
            f"{joined[-1].role if joined else 'none'} alone or at its end; answers are not continued from a given "
            "beginning"
        )
    digest = _hash(b"", json.dumps(body, ensure_ascii=False, sort_keys=True))
    return ModelRequest(
        messages=joined,
        functions=functions,
        max_tokens=max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else None,
        stream=body.get("stream") is True,
        model=str(body.get("model") or "policy"),
        digest=digest,
        options=options,
    )


def parse_arguments(text: object) -> Mapping[str, Any]:
    """Return a call's arguments, which dialects send as an object or as its JSON; GatewayError if it is neither."""
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            text = json.loads(text or "{}")
    if not isinstance(text, Mapping):
        raise GatewayError(f"expected a call's arguments to be a JSON object, got {text!r:.80}")
    return text


def join_parts(content: object, texts: Mapping[str, str], where: str) -> str:
    """Return the text of a message's content: a string, or parts whose type is among `texts`, with the key of each.

    Raises:
        GatewayError: A part is an image or something else that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise GatewayError(f"expected {where} to be a text or a list of parts, got {content!r:.80}")
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in texts:
            raise GatewayError(
                f"expected texts in {where}, got a part of type {kind!r}; the policy reads text only: leave images, "
                "audio and files out",
                code="unsupported_content",
            )
        found.append(str(part.get(texts[kind]) or ""))
    return "\n".join(found)


REFUSED_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "stop": (None, [], ""),
    "stop_sequences": (None, []),
    "logit_bias": (None, {}),
    "background": (None, False),
    "previous_response_id": (None, ""),
    "conversation": (None,),
}
"""Options that would change what is sampled or recorded, with the values that change nothing."""


def require_plain(body: Mapping[str, Any]) -> None:
    """Raise GatewayError if a body has an option that cannot be followed."""
    for option, harmless in REFUSED_OPTIONS.items():
        if body.get(option) not in harmless:
            raise GatewayError(
                f"expected no {option}, got {body[option]!r:.80}; leave it out: the policy samples every token freely, "
                "as it is trained to"
            )
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        raise GatewayError(
            f"expected tool_choice to be auto or none, got {choice!r:.80}; the policy is never forced to call a tool"
        )


def wants_tools(body: Mapping[str, Any]) -> bool:
    """Whether the policy may call the tools of a body."""
    choice = body.get("tool_choice")
    return (choice.get("type") if isinstance(choice, Mapping) else choice) != "none"


def make_function(name: object, description: object, parameters: object) -> dict[str, Any]:
    """Return a tool in the form that chat templates take; GatewayError if it has no name."""
    if not isinstance(name, str) or not name:
        raise GatewayError(f"expected a tool with a name, got {name!r:.80}")
    function = {"name": name, "description": str(description or ""), "parameters": parameters or {}}
    return {"type": "function", "function": function}
