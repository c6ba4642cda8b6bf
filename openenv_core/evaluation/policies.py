"""Policies: random actions, a Python callable, a model behind the OpenAI protocol, a checkpoint."""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, Protocol, TypeAlias

from pydantic import AliasPath, BaseModel, Field, ValidationError

from openenv_core.adapters.episode import TextEpisode
from openenv_core.checker.drawing import Sampler
from openenv_core.errors import ConfigurationError, OpenEnvError, installed_with
from openenv_core.evaluation.endpoint import EndpointClient, RequestRefusedError, to_plain_text
from openenv_core.evaluation.records import EpisodeRecord, EvaluationSettings
from openenv_core.protocol.jsonio import from_json
from openenv_core.tools.specs import is_of_tools
from openenv_core.tracebacks import in_place

Json: TypeAlias = dict[str, Any]

RANDOM: Final = "random"
GROUP: Final = "ropewalk.evaluation"
"""Entry points of higher packages: `checkpoint` makes a `ChatModel` of a folder, `agent` an `EpisodePolicy`, `config`
plays a run's policy."""

MAX_ANSWER_BYTES: Final = 16 << 20


class PolicyError(OpenEnvError):
    """The policy itself is broken or does not answer, whatever the episode; the message says how."""


class PolicyRefusedError(PolicyError):
    """The model's server refuses a request, for example because the chat is too long."""


class PolicyLostError(OpenEnvError):
    """The policy did not answer in time: this episode is lost and may be played again."""


Act: TypeAlias = Callable[[Json], Any]
"""Maps an observation's fields to an action: a mapping or a model, or an awaitable of one."""


class ActionPolicy(Protocol):
    """A policy that answers observations with actions."""

    def begin(self, key: str, schema: Json, tools: Sequence[Json]) -> Act:
        """Begin an episode.

        Args:
            key: The seed of its random numbers.
            schema: The server's JSON schema of actions.
            tools: The tools of an environment of tools; otherwise empty.
        """


class RandomPolicy:
    """Draws actions from the environment's schema, or calls of its tools with arguments from their schemas."""

    def begin(self, key: str, schema: Json, tools: Sequence[Json]) -> Act:
        """See `ActionPolicy.begin`."""
        source = random.Random(key)
        if not is_of_tools(schema):
            sampler = Sampler(schema, source)
            return lambda observation: sampler.draw()
        if not tools:
            raise PolicyError("the environment lists no tools for the random policy to call")
        samplers = {
            str(tool["name"]): Sampler(tool.get("input_schema") or tool.get("inputSchema") or {}, source)
            for tool in tools
        }

        def act(observation: Json) -> Json:
            name = source.choice(list(samplers))
            return {"type": "call_tool", "tool_name": name, "arguments": samplers[name].draw()}

        return act


@dataclass(frozen=True, slots=True)
class CallablePolicy:
    """A policy that calls a function with each observation; a class is instantiated for each episode."""

    target: Callable[..., Any]

    def begin(self, key: str, schema: Json, tools: Sequence[Json]) -> Act:
        """See `ActionPolicy.begin`."""
        return self.target() if isinstance(self.target, type) else self.target


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call by a model; `arguments` is the raw text if it is not a JSON object."""

    id: str
    name: str
    arguments: Json | str


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A model's answer: its text and its tool calls; how many tokens it has, if known; whether a limit cut it."""

    text: str
    calls: tuple[RequestedCall, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    was_cut: bool = False

    @property
    def shown(self) -> str:
        """The text and the calls as one text, for a reader."""
        calls = (
            f"<tool_call>{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}</tool_call>"
            for call in self.calls
        )
        return "\n".join(filter(None, [self.text, *calls]))


class Chat(Protocol):
    """One episode's conversation with a model."""

    async def answer(self) -> ChatAnswer | None:
        """Return the next answer; None if the context has no room for one.

        Raises:
            PolicyLostError: There was no answer in time.
        """

    def add_messages(self, messages: Sequence[Json]) -> None:
        """Append the results of the last answer, as messages of the roles `tool` and `user`."""


class ChatModel(Protocol):
    """A policy that plays by chatting."""

    def begin(self, messages: Sequence[Json], tools: Sequence[Json], seed: int) -> Chat:
        """Begin a conversation.

        Args:
            messages: The first messages.
            tools: Function schemas in OpenAI's format; empty if calls are written as text.
            seed: The seed of the model's sampling.
        """

    async def close(self) -> None:
        """Release all that was started for the model."""


class EpisodePolicy(Protocol):
    """A policy that plays whole episodes by itself, as an agent does."""

    async def play(self, game: TextEpisode, observation: str, record: EpisodeRecord, seed: int) -> None:
        """Play an episode after its reset; set the record's `ending`, `turns` and `tool_calls`.

        Args:
            game: The episode.
            observation: Its first observation.
            record: The record to fill in; its reward is set by the caller.
            seed: The seed of the policy's random choices.

        Raises:
            PolicyLostError: The policy failed, and the episode may be played again.
        """

    async def close(self) -> None:
        """Release all that was started for the policy."""


AnyPolicy: TypeAlias = ActionPolicy | ChatModel | EpisodePolicy


@asynccontextmanager
async def open_policy(settings: EvaluationSettings, folder: Path) -> AsyncIterator[AnyPolicy]:
    """Open the policy of the settings, and close it after the block; ConfigurationError if it cannot be loaded.

    Args:
        settings: The evaluation's settings.
        folder: Its folder, where an agent's outputs are kept.
    """
    async with AsyncExitStack() as opened:
        if settings.policy == RANDOM:
            yield RandomPolicy()
        elif settings.policy.startswith(("http://", "https://")):
            model = EndpointModel(settings)
            opened.push_async_callback(model.close)
            await model.start()
            if settings.agent is None:
                yield model
                return
            agent: EpisodePolicy = load_provided("agent", "an agent")(settings, model, folder)
            opened.push_async_callback(agent.close)
            yield agent
        elif _is_folder(settings.policy):
            checkpoint: ChatModel = await load_provided("checkpoint", "a checkpoint as the policy")(settings)
            opened.push_async_callback(checkpoint.close)
            yield checkpoint
        else:
            yield CallablePolicy(_import_callable(settings.policy))


def _is_folder(policy: str) -> bool:
    return Path(os.path.expanduser(policy)).is_dir()


def load_provided(name: str, expected: str) -> Any:
    """Return an entry point of GROUP, loaded; ConfigurationError if no installed package provides it."""
    point = next(iter(entry_points(group=GROUP, name=name)), None)
    with installed_with("rl", expected):
        if point is None:
            raise ImportError(f"no package offers the entry point {GROUP}:{name}")
        return point.load()


def _import_callable(text: str) -> Callable[..., Any]:
    if ":" not in text:
        text = ":".join(text.rpartition(".")[::2])
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        target: Callable[..., Any] = resolve_name(text)
    except ValueError:
        raise ConfigurationError(
            f"expected --policy as random, module:callable, a URL up to and with /v1, or a checkpoint's folder, got "
            f"{text!r}"
        ) from None
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"cannot import the policy {text!r}{in_place(error)}") from error
    if not callable(target):
        raise ConfigurationError(f"expected {text!r} to be callable, got {type(target).__name__}")
    return target


class _ToolCall(BaseModel):
    id: str = ""
    name: str = Field(validation_alias=AliasPath("function", "name"))
    arguments: str | Json = Field("", validation_alias=AliasPath("function", "arguments"))


class _ChatResponse(BaseModel):
    message: Json = Field(validation_alias=AliasPath("choices", 0, "message"))
    content: str | None = Field(None, validation_alias=AliasPath("choices", 0, "message", "content"))
    tool_calls: list[_ToolCall] | None = Field(
        None, validation_alias=AliasPath("choices", 0, "message", "tool_calls")
    )
    finish_reason: str | None = Field(None, validation_alias=AliasPath("choices", 0, "finish_reason"))
    prompt_tokens: int = Field(0, validation_alias=AliasPath("usage", "prompt_tokens"))
    completion_tokens: int = Field(0, validation_alias=AliasPath("usage", "completion_tokens"))


class EndpointModel:
    """A model behind a server of the OpenAI chat protocol.

    Raises:
        ConfigurationError: The key is missing.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings
        self.model = settings.model
        self._http = EndpointClient(
            settings.policy.rstrip("/"),
            settings.key_variable,
            connections=settings.sessions,
            max_bytes=MAX_ANSWER_BYTES,
        )

    async def start(self) -> None:
        """Select the model by the server's list; ConfigurationError if it does not serve the requested model."""
        listed = await self.request("GET", "/models")
        names = [str(model.get("id")) for model in listed.get("data", []) if isinstance(model, Mapping)]
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            served = ", ".join(map(to_plain_text, sorted(names)[:10])) or "none"
            raise ConfigurationError(
                f"expected --model as one of {served}, which {self.settings.policy} serves, got {self.model!r}"
            )

    async def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send a request, with retries, within `policy_timeout_s`; return the JSON object of the response."""
        limit_s = self.settings.policy_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                content = await self._http.request(method, path, body)
        except TimeoutError:
            raise PolicyLostError(
                f"expected an answer of {self.settings.policy} within {limit_s:g} s; last there was "
                f"{self._http.trouble}"
            ) from None
        try:
            document = json.loads(content)
            if b"\\ud" in content.lower():  # half of a surrogate pair can be neither sent back nor recorded
                document = json.loads(json.dumps(document, ensure_ascii=False).encode(errors="replace"))
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise PolicyError(
                f"expected JSON of {self.settings.policy}{path}, got {to_plain_text(repr(content[:200]))}"
            )
        return document

    def begin(self, messages: Sequence[Json], tools: Sequence[Json], seed: int) -> "EndpointChat":
        """See `ChatModel.begin`."""
        return EndpointChat(self, list(messages), list(tools), seed)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


@dataclass
class EndpointChat:
    """A `Chat` with an `EndpointModel`."""

    _model: EndpointModel
    _messages: list[Json]
    _tools: list[Json]
    _seed: int
    _answers: int = 0

    async def answer(self) -> ChatAnswer | None:
        """See `Chat.answer`."""
        settings = self._model.settings
        body: Json = {
            "model": self._model.model,
            "messages": self._messages,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            **({"seed": self._seed + self._answers} if settings.temperature > 0 else {}),
            **({"tools": self._tools} if self._tools else {}),
        }
        try:
            response = await self._model.request("POST", "/chat/completions", body)
        except RequestRefusedError as error:
            if self._answers:  # the chat has outgrown the context
                return None
            raise PolicyRefusedError(
                f"{settings.policy} refuses the first request of an episode: {error}; --mode text does without tools"
            ) from error
        try:
            reply = _ChatResponse.model_validate(response)
        except ValidationError as error:
            raise PolicyError(
                f"expected an answer of the OpenAI chat protocol, got {to_plain_text(repr(response))}"
            ) from error
        self._answers += 1
        calls = tuple(
            RequestedCall(call.id or f"call_{number}", call.name, _arguments(call.arguments))
            for number, call in enumerate(reply.tool_calls or ())
        )
        self._messages.append(
            {"role": "assistant", "content": reply.content or ""}
            | ({"tool_calls": [_call_as_json(call) for call in calls]} if calls else {})
        )
        return ChatAnswer(
            reply.content or "",
            calls,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            was_cut=reply.finish_reason == "length",
        )

    def add_messages(self, messages: Sequence[Json]) -> None:
        """See `Chat.add_messages`."""
        self._messages += messages


def _arguments(text: str | Json) -> Json | str:
    if isinstance(text, dict):
        return text
    try:
        arguments = from_json(text or "{}")  # as `read_call`
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text


def _call_as_json(call: RequestedCall) -> Json:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
