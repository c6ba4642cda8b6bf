"""Anthropic's Messages."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from rl_bridge.gateway.dialects.base import Dialect, as_list, dump_arguments, event
from rl_bridge.gateway.messages import (
    CallNames,
    Finish,
    FunctionCall,
    GatewayError,
    Message,
    ModelRequest,
    Reply,
    ReplyHead,
    join_parts,
    make_function,
    make_request,
    parse_arguments,
    require_plain,
    wants_tools,
)

_TEXTS: Final = {"text": "text"}
_THOUGHTS: Final = ("thinking", "redacted_thinking")
_STOPS: Final = {Finish.STOP: "end_turn", Finish.CALLS: "tool_use", Finish.LENGTH: "max_tokens"}
_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "overloaded_error",
}
_BILLING: Final = "x-anthropic-billing-header:"
"""How a system message begins that is for billing only; it differs from request to request."""


class MessagesDialect(Dialect):
    """`POST /v1/messages`."""

    PING: ClassVar[bytes] = event({"type": "ping"}, "ping")

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Dialect.read`."""
        require_plain(body)
        messages, names = [], CallNames()
        if system := _read_system(body.get("system")):
            messages.append(Message(role="system", content=system))
        for item in as_list(body.get("messages"), "messages"):
            role, content = item.get("role"), item.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if role == "assistant":
                messages.append(_read_answer(as_list(blocks, "content"), names))
            elif role == "user":
                messages += _read_user(as_list(blocks, "content"), names)
            elif role == "system":
                messages.append(Message(role="system", content=_read_system(content)))
            else:
                raise GatewayError(f"expected a message of the role user or assistant, got {role!r:.40}")
        tools = as_list(body.get("tools"), "tools") if wants_tools(body) else []
        functions = [
            make_function(tool.get("name"), tool.get("description"), tool.get("input_schema"))
            for tool in tools
            if "input_schema" in tool  # the others are run by the provider of the model
        ]
        return make_request(body, messages, functions, body.get("max_tokens"))

    def write(self, reply: Reply, request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.write`."""
        return {
            **_head(reply.head),
            "content": [block for block, _ in _blocks(reply)],
            "stop_reason": _STOPS[reply.finish],
            "usage": {**_usage(reply.head), "output_tokens": reply.completion_tokens},
        }

    def open_stream(self, head: ReplyHead, request: ModelRequest) -> Iterator[bytes]:
        """See `Dialect.open_stream`."""
        yield event({"type": "message_start", "message": _head(head)}, "message_start")

    def stream(self, reply: Reply, request: ModelRequest) -> Iterator[bytes]:
        """See `Dialect.stream`."""
        for index, (block, deltas) in enumerate(_blocks(reply)):
            start = {
                "type": "content_block_start",
                "index": index,
                "content_block": {**block, **_empty(block)},
            }
            yield event(start, "content_block_start")
            for delta in deltas:
                change = {"type": "content_block_delta", "index": index, "delta": delta}
                yield event(change, "content_block_delta")
            yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
        delta = {"stop_reason": _STOPS[reply.finish], "stop_sequence": None}
        usage = {**_usage(reply.head), "output_tokens": reply.completion_tokens}
        yield event({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def write_error(self, error: GatewayError) -> dict[str, Any]:
        """See `Dialect.write_error`."""
        kind = _ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def stream_error(self, error: GatewayError, head: ReplyHead, request: ModelRequest) -> bytes:
        """See `Dialect.stream_error`."""
        return event(self.write_error(error), "error")

    def write_count(self, tokens: int) -> dict[str, Any]:
        """See `Dialect.write_count`."""
        return {"input_tokens": tokens}


def _read_system(system: object) -> str:
    if isinstance(system, list):
        system = [
            part
            for part in system
            if not (isinstance(part, Mapping) and str(part.get("text")).startswith(_BILLING))
        ]
    return join_parts(system, _TEXTS, "the system message")


def _read_answer(blocks: list[Mapping[str, Any]], names: CallNames) -> Message:
    calls = tuple(
        FunctionCall(str(block.get("id")), str(block.get("name")), parse_arguments(block.get("input")))
        for block in blocks
        if block.get("type") == "tool_use"
    )
    names.add(calls)
    texts = [block for block in blocks if block.get("type") not in ("tool_use", *_THOUGHTS)]
    return Message(
        role="assistant", content=join_parts(texts, _TEXTS, "a message of the assistant"), calls=calls
    )


def _read_user(blocks: list[Mapping[str, Any]], names: CallNames) -> Iterator[Message]:
    """Yield the results of tools in a message, each as a message, and its texts as one."""
    texts = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        content = join_parts(block.get("content"), _TEXTS, "a tool's result")
        yield names.make_result(block.get("tool_use_id"), content)
    if texts:
        yield Message(role="user", content=join_parts(texts, _TEXTS, "a message of the user"))


def _blocks(reply: Reply) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the blocks of a reply, each with the deltas that make it up in a stream."""
    if reply.thought:
        signature = reply.head.id
        block: dict[str, Any] = {"type": "thinking", "thinking": reply.thought, "signature": signature}
        written = {"type": "thinking_delta", "thinking": reply.thought}
        yield block, [written, {"type": "signature_delta", "signature": signature}]
    if reply.text or not reply.calls:
        yield {"type": "text", "text": reply.text}, [{"type": "text_delta", "text": reply.text}]
    for call in reply.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        yield block, [{"type": "input_json_delta", "partial_json": dump_arguments(call.arguments)}]


def _empty(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a block before its first delta."""
    kind = block["type"]
    if kind == "tool_use":
        return {"input": {}}
    return {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}


def _head(head: ReplyHead) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_usage(head), "output_tokens": 0},
    }


def _usage(head: ReplyHead) -> dict[str, Any]:
    return {
        "input_tokens": head.prompt_tokens - head.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": head.cached_tokens,
    }
