"""OpenAI's chat completions."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rl_bridge.gateway.dialects.base import Dialect, as_list, dump_arguments, event, openai_error
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

_TEXTS: Final = {"text": "text", "refusal": "refusal"}
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_FINISHES: Final = {Finish.STOP: "stop", Finish.CALLS: "tool_calls", Finish.LENGTH: "length"}


class ChatDialect(Dialect):
    """`POST /v1/chat/completions`."""

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Dialect.read`."""
        require_plain(body)
        names, messages = CallNames(), []
        for item in as_list(body.get("messages"), "messages"):
            role = item.get("role")
            content = join_parts(item.get("content"), _TEXTS, f"a message of the role {role!r:.20}")
            if role in ("tool", "function"):
                messages.append(
                    names.make_result(item.get("tool_call_id"), content, str(item.get("name") or ""))
                )
            elif role in _ROLES:
                calls = tuple(map(_read_call, as_list(item.get("tool_calls"), "tool_calls")))
                names.add(calls)
                messages.append(Message(role=_ROLES[str(role)], content=content, calls=calls))
            else:
                raise GatewayError(
                    f"expected a message of the role {', '.join(_ROLES)} or tool, got {role!r:.40}"
                )
        tools = as_list(body.get("tools"), "tools") if wants_tools(body) else []
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        usage = body.get("stream_options") or {}
        return make_request(
            body,
            messages,
            [_read_tool(tool) for tool in tools],
            limit,
            usage=usage.get("include_usage") is True,
        )

    def write(self, reply: Reply, request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.write`."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if reply.calls:
            message["tool_calls"] = [_write_call(call) for call in reply.calls]
        elif not reply.text:
            message["content"] = ""
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISHES[reply.finish]}
        return {**_head(reply.head, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def open_stream(self, head: ReplyHead, request: ModelRequest) -> Iterator[bytes]:
        """See `Dialect.open_stream`."""
        yield _chunk(head, {"role": "assistant", "content": ""})

    def stream(self, reply: Reply, request: ModelRequest) -> Iterator[bytes]:
        """See `Dialect.stream`."""
        if reply.thought:
            yield _chunk(reply.head, {"reasoning_content": reply.thought})
        if reply.text:
            yield _chunk(reply.head, {"content": reply.text})
        for index, call in enumerate(reply.calls):
            yield _chunk(reply.head, {"tool_calls": [{"index": index, **_write_call(call)}]})
        yield _chunk(reply.head, {}, _FINISHES[reply.finish])
        if request.options["usage"]:
            yield event({**_head(reply.head, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def write_error(self, error: GatewayError) -> dict[str, Any]:
        """See `Dialect.write_error`."""
        return openai_error(error)

    def stream_error(self, error: GatewayError, head: ReplyHead, request: ModelRequest) -> bytes:
        """See `Dialect.stream_error`."""
        return event(openai_error(error))

    def write_count(self, tokens: int) -> dict[str, Any]:
        """See `Dialect.write_count`; the protocol has no such request."""
        return {"prompt_tokens": tokens}


def _read_call(call: Mapping[str, Any]) -> FunctionCall:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise GatewayError(f"expected a call of a function, got one of type {call.get('type')!r:.40}")
    arguments = parse_arguments(function.get("arguments"))
    return FunctionCall(str(call.get("id")), str(function.get("name")), arguments)


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise GatewayError(f"expected tools of type function, got {tool.get('type')!r:.40}")
    return make_function(function.get("name"), function.get("description"), function.get("parameters"))


def _write_call(call: FunctionCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dump_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _head(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _chunk(head: ReplyHead, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return event({**_head(head, "chat.completion.chunk"), "choices": [choice]})


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.head.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.head.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.head.cached_tokens},
    }
