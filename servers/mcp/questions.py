"""Questions to a client, in MCP's own JSON, and whether it has said that it answers such."""

from collections.abc import Mapping
from typing import Any, assert_never

import mcp_types as types
from pydantic import BaseModel, ValidationError

from openenv_core.tools import Elicit, Request, Roots, Sample


def to_mcp(question: Request) -> dict[str, Any]:
    """Return MCP's own JSON of a question."""
    match question:
        case Elicit(message=message, schema=schema):
            params: dict[str, Any] = {"message": message, "requestedSchema": dict(schema)}
            return {"method": "elicitation/create", "params": params}
        case Sample(messages=messages, max_tokens=max_tokens, options=options):
            if isinstance(messages, str):
                said: list[Any] = [{"role": "user", "content": {"type": "text", "text": messages}}]
            else:
                said = [dict(message) for message in messages]
            return {
                "method": "sampling/createMessage",
                "params": {"messages": said, "maxTokens": max_tokens, **options},
            }
        case Roots():
            return {"method": "roots/list"}
    assert_never(question)


def request_of(question: Request) -> types.ServerRequest:
    """Return the SDK's model of a question.

    Raises:
        ValidationError: It is none that MCP has.
    """
    model: type[Any] = {Elicit: types.ElicitRequest, Sample: types.CreateMessageRequest}.get(
        type(question), types.ListRootsRequest
    )
    request: types.ServerRequest = model.model_validate(to_mcp(question), by_name=False)
    return request


def answer_model(question: Request) -> type[BaseModel]:
    """Return the SDK's model of the answers to a question."""
    match question:
        case Elicit():
            return types.ElicitResult
        case Sample(options=options):
            with_tools = "tools" in options or "toolChoice" in options
            return types.CreateMessageResultWithTools if with_tools else types.CreateMessageResult
        case Roots():
            return types.ListRootsResult
    assert_never(question)


def read_answer(question: Request, answer: object) -> dict[str, Any] | None:
    """Return an answer that a client has sent, if it is one to this question."""
    try:
        read = answer_model(question).model_validate(answer, by_name=False)
    except ValidationError:
        return None
    return read.model_dump(mode="json", by_alias=True, exclude_none=True)


def lacking(
    questions: Mapping[str, Request], capabilities: types.ClientCapabilities | None
) -> dict[str, dict[str, Any]]:
    """Return the capabilities that a client has not declared and that answering takes, in MCP's own JSON."""
    found: dict[str, dict[str, Any]] = {}
    for question in questions.values():
        name = _capability(question)
        if capabilities is None or getattr(capabilities, name) is None:
            found[name] = {}
    return found


def _capability(question: Request) -> str:
    match question:
        case Elicit():
            return "elicitation"
        case Sample():
            return "sampling"
        case Roots():
            return "roots"
    assert_never(question)
