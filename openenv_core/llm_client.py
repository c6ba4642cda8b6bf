"""Clients of language models, for judges and agents, with the released names.

    client = OpenAIClient("http://localhost", 8000, model="Qwen/Qwen3-4B")
    text = await client.complete("What is 2 + 2?")

`OpenAIClient` works with every server of OpenAI's chat completions API, such as vLLM and Ollama, and needs only httpx;
`AnthropicClient` needs the package `anthropic`.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from openenv_core.errors import ConfigurationError, LLMError
from openenv_core.evaluation.endpoint import EndpointClient, RequestRefusedError, to_plain_text
from openenv_core.tools.specs import openai_tools

REQUEST_TIMEOUT_S: Final = 600.0
"""Timeout of one answer. Callers that cannot wait so long use a timeout of their own, as `LLMJudge` does."""

ATTEMPTS: Final = 5
"""Number of attempts if the server is busy, fails or is unreachable."""

MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024

FIXED_SAMPLING_MODELS: Final = ("gpt-5-mini", "o1", "o3", "o4-mini")
"""Prefixes of OpenAI models that take no temperature, and `max_completion_tokens` instead of `max_tokens`."""


@dataclass
class ToolCall:
    """A tool call in an answer."""

    id: str
    name: str
    args: dict[str, Any]


@dataclass
class LLMResponse:
    """A model's answer: its text and tool calls."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_message_dict(self) -> dict[str, Any]:
        """Return the answer as a message in OpenAI's chat format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.args)},
                }
                for call in self.tool_calls
            ]
        return message


class LLMClient(ABC):
    """A client of a language model's server at `endpoint`, for example `http://localhost`, and `port`."""

    def __init__(self, endpoint: str, port: int) -> None:
        self.endpoint = endpoint
        self.port = port

    @property
    def base_url(self) -> str:
        """The server's URL."""
        return f"{self.endpoint}:{self.port}"

    @abstractmethod
    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """Return the answer to a prompt.

        Args:
            prompt: The whole prompt.
            kwargs: `temperature` and `max_tokens`, to override the client's.

        Raises:
            LLMError: The model gave no answer.
        """

    async def complete_with_tools(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **kwargs: Any
    ) -> LLMResponse:
        """Return the answer of a model that may call tools.

        Args:
            messages: The chat in OpenAI's format.
            tools: The tools as MCP lists them.
            kwargs: As for `complete`.

        Raises:
            LLMError: The model gave no answer.
        """
        raise NotImplementedError(f"{type(self).__name__} calls no tools")


@dataclass(eq=False)
class _HostedClient(LLMClient):
    """Base class of the clients below.

    Attributes:
        endpoint: The server's URL without the port.
        port: The server's port.
        model: Name of the model on the server.
        api_key: The server's API key, if it needs one.
        system_prompt: System message before every prompt.
        temperature: Sampling temperature.
        max_tokens: Maximum tokens of an answer.
    """

    endpoint: str
    port: int
    model: str
    api_key: str | None = field(default=None, repr=False)
    system_prompt: str | None = None
    temperature: float = 0.0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        self._key = self.api_key or "not-needed"

    def _request_body(
        self, messages: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], tools: Sequence[Any] = ()
    ) -> dict[str, Any]:
        sampling = {name: overrides.get(name, getattr(self, name)) for name in ("temperature", "max_tokens")}
        return {"model": self.model, "messages": messages, **sampling, **({"tools": tools} if tools else {})}


@dataclass(eq=False)
class OpenAIClient(_HostedClient):
    """A client of OpenAI's chat completions API, `/v1/chat/completions`.

    Its methods raise `LLMError` if there is no answer, or an invalid one.

    Attributes:
        use_max_completion_tokens: Send `max_completion_tokens` and no temperature, as OpenAI's newer models require.
    """

    use_max_completion_tokens: bool = field(default=False, kw_only=True)

    def _request_body(
        self, messages: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], tools: Sequence[Any] = ()
    ) -> dict[str, Any]:
        body = super()._request_body(messages, overrides, tools)
        if self.use_max_completion_tokens:
            del body["temperature"]
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """See `LLMClient.complete`."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        body = self._request_body([*system, {"role": "user", "content": prompt}], kwargs)
        return (await self._message(body)).get("content") or ""

    async def complete_with_tools(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **kwargs: Any
    ) -> LLMResponse:
        """See `LLMClient.complete_with_tools`."""
        message = await self._message(self._request_body(messages, kwargs, _mcp_tools_to_openai(tools)))
        try:
            calls = [
                ToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls") or ()
            ]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LLMError(f"expected arguments of tools in JSON, got {error}") from error
        # Some servers leave out `content` beside tool calls, instead of null.
        return LLMResponse(message.get("content") or "", calls)

    async def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._post(body)
        try:
            message = json.loads(answer)["choices"][0]["message"]
            if not isinstance(message, dict):
                raise TypeError
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            # A server may echo the key.
            got = to_plain_text(answer.decode(errors="replace").replace(self._key.strip(), "***"), 200)
            raise LLMError(f"expected a chat completion of {self.base_url}, got {got!r}") from error
        return message

    async def _post(self, body: dict[str, Any]) -> bytes:
        """Send a request on a connection of its own, so that a client is bound to no event loop."""
        url, names = f"{self.base_url}/v1", ("endpoint", "api_key")
        try:
            client = EndpointClient(
                url, None, connections=1, max_bytes=MAX_ANSWER_BYTES, key=self._key, names=names
            )
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    return await client.request("POST", "/chat/completions", body, ATTEMPTS)
            except TimeoutError:
                text = f"expected an answer of {url} within {REQUEST_TIMEOUT_S:g} s, got {client.trouble}"
                raise LLMError(text) from None
            finally:
                await client.close()
        except (ConfigurationError, RequestRefusedError) as error:
            raise LLMError(str(error)) from error


class AnthropicClient(_HostedClient):
    """A client of Anthropic's Messages API.

    Raises:
        ImportError: The package `anthropic` is not installed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        from anthropic import AsyncAnthropic

        self._client = AsyncAnthropic(base_url=self.base_url, api_key=self._key)

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """See `LLMClient.complete`."""
        messages = [{"role": "user", "content": prompt}]
        return (await self.complete_with_tools(messages, [], **kwargs)).content

    async def complete_with_tools(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **kwargs: Any
    ) -> LLMResponse:
        """See `LLMClient.complete_with_tools`."""
        system_text, chat = _openai_msgs_to_anthropic(messages)
        system = {"system": system_message} if (system_message := system_text or self.system_prompt) else {}
        answer = await self._client.messages.create(
            **self._request_body(chat, kwargs, _mcp_tools_to_anthropic(tools)), **system
        )
        return LLMResponse(
            "".join(block.text for block in answer.content if block.type == "text"),
            [ToolCall(b.id, b.name, dict(b.input)) for b in answer.content if b.type == "tool_use"],
        )


def create_llm_client(provider: str, model: str, api_key: str, **options: Any) -> LLMClient:
    """Return a client of OpenAI's or Anthropic's hosted API.

    Args:
        provider: "openai" or "anthropic".
        model: The provider's name of the model.
        api_key: The API key.
        options: `system_prompt`, `temperature` and `max_tokens` (4096) of the client.

    Raises:
        ValueError: There is no such provider.
    """
    options = {"api_key": api_key, "max_tokens": 4096, **options}
    match provider.lower():
        case "openai":
            has_fixed_sampling = model.startswith(FIXED_SAMPLING_MODELS)
            return OpenAIClient(
                "https://api.openai.com", 443, model, use_max_completion_tokens=has_fixed_sampling, **options
            )
        case "anthropic":
            return AnthropicClient("https://api.anthropic.com", 443, model, **options)
    raise ValueError(f"expected provider to be 'openai' or 'anthropic', got {provider!r}")


def _clean_mcp_schema(schema: Any) -> dict[str, Any]:
    """Flatten a tool's input schema, which may use oneOf, anyOf or allOf, to a plain object schema."""
    empty: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    if not isinstance(schema, Mapping):
        return empty
    for union in ("oneOf", "anyOf"):
        options = [option for option in schema.get(union, ()) if isinstance(option, Mapping)]
        if union in schema:
            schema = next((option for option in options if option.get("type") == "object"), empty)
    if "allOf" in schema:
        parts = [subschema for subschema in schema["allOf"] if isinstance(subschema, Mapping)]
        schema = {
            "properties": {
                name: property_schema
                for subschema in parts
                for name, property_schema in subschema.get("properties", {}).items()
            },
            "required": [name for subschema in parts for name in subschema.get("required", ())],
        }
    return {**empty, **schema}


_mcp_tools_to_openai: Final = openai_tools


def _mcp_tools_to_anthropic(mcp_tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "input_schema": _clean_mcp_schema(tool.get("inputSchema")),
        }
        for tool in mcp_tools
    ]


def _openai_msgs_to_anthropic(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the system text, and the other messages in Anthropic's format, where tool results have the role user."""
    system: list[str] = []
    chat: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "system":
            system.append(content)
        elif role == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            if chat and chat[-1]["role"] == "user" and isinstance(chat[-1]["content"], list):
                chat[-1]["content"].append(block)
            else:
                chat.append({"role": "user", "content": [block]})
        elif calls := message.get("tool_calls"):
            text_blocks = [{"type": "text", "text": content}] if content else []
            chat.append({"role": role, "content": [*text_blocks, *map(_tool_use, calls)]})
        else:
            chat.append({"role": role, "content": content})
    return "\n\n".join(system), chat


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": read}
