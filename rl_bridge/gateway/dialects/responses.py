"""OpenAI's Responses, without state of the server's: each request has the whole chat."""

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

_TEXTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ResponsesDialect(Dialect):
    """`POST /v1/responses`."""

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Dialect.read`."""
        require_plain(body)
        messages, names = [], CallNames()
        if instructions := body.get("instructions"):
            messages.append(Message(role="system", content=str(instructions)))
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        found = [_read_item(item, names) for item in as_list(items, "input")]
        messages += [message for message in found if message is not None]
        functions, spaces = _read_tools(as_list(body.get("tools"), "tools") if wants_tools(body) else [])
        return make_request(body, messages, functions, body.get("max_output_tokens"), spaces=spaces)

    def write(self, reply: Reply, request: ModelRequest) -> dict[str, Any]:
        """See `Dialect.write`."""
        cut = reply.finish is Finish.LENGTH
        response = _head(reply.head, "incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response | {"output": _items(reply, request), "usage": _usage(reply)}

    def open_stream(self, head: ReplyHead, request: ModelRequest) -> Iterator[bytes]:
        """See `Dialect.open_stream`."""
        for number, kind in enumerate(("response.created", "response.in_progress")):
            yield _event(kind, number, response=_head(head, "in_progress"))

    def stream(self, reply: Reply, request: ModelRequest) -> Iterator[bytes]:
        """See `Dialect.stream`."""
        number = 2
        for index, item in enumerate(_items(reply, request)):
            for kind, fields in _item_events(item):
                yield _event(kind, number, output_index=index, **fields)
                number += 1
        response = self.write(reply, request)
        yield _event(f"response.{response['status']}", number, response=response)

    def write_error(self, error: GatewayError) -> dict[str, Any]:
        """See `Dialect.write_error`."""
        return openai_error(error)

    def stream_error(self, error: GatewayError, head: ReplyHead, request: ModelRequest) -> bytes:
        """See `Dialect.stream_error`."""
        response = _head(head, "failed") | {"error": {"code": "server_error", "message": str(error)}}
        return _event("response.failed", 2, response=response)

    def write_count(self, tokens: int) -> dict[str, Any]:
        """See `Dialect.write_count`."""
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _read_item(item: Mapping[str, Any], names: CallNames) -> Message | None:
    """Return the message of an item; None for a thought, which clients may send back or not."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise GatewayError(f"expected a message of the role {', '.join(_ROLES)}, got {role!r:.40}")
        content = join_parts(item.get("content"), _TEXTS, f"a message of the role {role}")
        return Message(role=_ROLES[str(role)], content=content)
    if kind == "function_call":
        name = _join_name(str(item.get("namespace") or ""), str(item.get("name")))
        call = FunctionCall(str(item.get("call_id")), name, parse_arguments(item.get("arguments")))
        names.add([call])
        return Message(role="assistant", content="", calls=(call,))
    if kind == "function_call_output":
        content = join_parts(item.get("output"), _TEXTS, "a tool's result")
        return names.make_result(item.get("call_id"), content)
    if kind == "reasoning":
        return None
    raise GatewayError(
        f"expected items that are messages, function calls and their outputs, got one of type {kind!r:.40}",
        code="unsupported_content",
    )


def _read_tools(tools: list[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Return the functions among tools, and of those in a namespace their namespace and name by the whole name.

    Other tools are run by the provider of the model, or take text of a grammar; the policy is not told of them.
    """
    functions, spaces = [], {}
    for tool in tools:
        if tool.get("type") == "function":
            functions.append(make_function(tool.get("name"), tool.get("description"), tool.get("parameters")))
        elif tool.get("type") == "namespace":
            space = str(tool.get("name"))
            for inner in as_list(tool.get("tools"), "the tools of a namespace"):
                name = _join_name(space, str(inner.get("name")))
                functions.append(make_function(name, inner.get("description"), inner.get("parameters")))
                spaces[name] = (space, str(inner.get("name")))
    return functions, spaces


def _join_name(space: str, name: str) -> str:
    """Return a function's name for the policy, which knows no namespaces."""
    return f"{space}{'' if space.endswith('_') or not space else '__'}{name}"


def _items(reply: Reply, request: ModelRequest) -> list[dict[str, Any]]:
    identity = reply.head.id
    items: list[dict[str, Any]] = []
    if reply.thought:
        content = [{"type": "reasoning_text", "text": reply.thought}]
        items.append({"id": f"rs_{identity}", "type": "reasoning", "summary": [], "content": content})
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        message = {"id": f"msg_{identity}", "type": "message", "status": "completed", "role": "assistant"}
        items.append({**message, "content": [part]})
    for call in reply.calls:
        space, name = request.options["spaces"].get(call.name, ("", call.name))
        item = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": name}
        if space:
            item["namespace"] = space
        items.append({**item, "arguments": dump_arguments(call.arguments), "status": "completed"})
    return items


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the type and fields of each event of an item."""
    here = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield "response.output_item.added", {"item": {**item, "arguments": "", "status": "in_progress"}}
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", {**here, "delta": arguments}
        done = {"name": item["name"], "arguments": arguments}
        yield "response.function_call_arguments.done", {**here, **done}
    elif item["type"] == "reasoning":
        yield "response.output_item.added", {"item": {**item, "content": []}}
        here["content_index"] = 0
        text = item["content"][0]["text"]
        yield "response.reasoning_text.delta", {**here, "delta": text}
        yield "response.reasoning_text.done", {**here, "text": text}
    else:
        yield "response.output_item.added", {"item": {**item, "content": [], "status": "in_progress"}}
        here["content_index"] = 0
        (part,) = item["content"]
        yield "response.content_part.added", {**here, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**here, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**here, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**here, "part": part}
    yield "response.output_item.done", {"item": item}


def _event(kind: str, number: int, **fields: Any) -> bytes:
    return event({"type": kind, "sequence_number": number, **fields}, kind)


def _head(head: ReplyHead, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "model": head.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.head.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.head.cached_tokens},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.head.prompt_tokens + reply.completion_tokens,
    }
