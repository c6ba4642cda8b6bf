"""Episodes in text: the base of the adapters to trainers."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, TypedDict

import httpx

from openenv_core.backoff import Backoff
from openenv_core.client import GenericEnvClient, MCPToolClient, SyncEnvClient
from openenv_core.client.carrier import refusal
from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    EnvironmentFailureError,
    ProtocolError,
    RequestTimeoutError,
    SessionError,
    ToolCallError,
    ValidationFailedError,
)
from openenv_core.loop_thread import shared_loop
from openenv_core.making import make
from openenv_core.pictures import describe_picture
from openenv_core.protocol.http import http_url, redact_url
from openenv_core.protocol.jsonio import from_json
from openenv_core.protocol.toolcalls import value_of
from openenv_core.proxies import proxy_for, tls_context
from openenv_core.tools import CallToolAction, ToolErrorType
from openenv_core.tools.specs import is_of_tools, openai_tools
from openenv_core.types import Observation, StepResult

ACT: Final = "act"
"""The single tool offered for an environment without tools; its arguments are the fields of an action."""

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 2.0

_TRANSIENT: Final = (
    CapacityError,
    ConnectionFailedError,
    ConnectionLostError,
    RequestTimeoutError,
    SessionError,
)
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CALL_FORMAT: Final = (
    "Call one tool at a time, like this: "
    '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>'
)


class EpisodeSettings(TypedDict, total=False):
    """Arguments of `TextEpisode`."""

    token: str | None
    reset_timeout_s: float
    step_timeout_s: float
    unfinished_reward: float | None


@dataclass(eq=False, repr=False)
class TextEpisode:
    """One session on a served environment, played by tool calls whose results are text.

    An environment of tools is played with its tools. Any other gets one tool, `act`, whose parameters are the fields
    of its action. Mistakes of the policy are reported in the text that a call returns. Other failures end the episode
    without a reward: `reward` is then None, never 0.

    Args:
        base_url: URL of the server, or of several equal ones; see `EnvClient`.
        token: Bearer token of the server.
        reset_timeout_s: Seconds for which a reset is retried while the server does not answer. A full one is waited for
            as long as by `EnvClient`, half an hour.
        step_timeout_s: Reply timeout in seconds.
        unfinished_reward: Reward of an episode that the policy left before its end; None: the rewards so far.

    Attributes:
        tools: Function schemas of the running episode's tools, in OpenAI's format. A reset may choose them, so they
            are listed after each.
        done: Whether the episode is over.
        failure: A failure that is not the policy's, in words; None without one.
        unscored: Why the episode cannot be scored, in words; None if it can.
        truncated: Whether a limit of the environment cut the episode off.
    """

    base_url: str | Sequence[str]
    _: KW_ONLY
    token: str | None = None
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    unfinished_reward: float | None = None

    def __post_init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self.done = self.truncated = False
        self.failure: str | None = None
        self.unscored: str | None = None
        self._client = MCPToolClient(
            self.base_url, token=self.token, message_timeout_s=self.step_timeout_s, mode="simulation"
        )
        self._acts: bool | None = None  # unknown before the first reset
        self._return = 0.0

    async def open(self) -> None:
        """Fetch the tools that the environment offers before a reset, for a trainer that fixes them then.

        Raises:
            ClientError: The server does not answer, or is not an OpenEnv server.
        """
        await self._read_schema()
        if not self._acts:
            await self._list_tools()

    async def _read_schema(self) -> None:
        if self._acts is None:
            schema = (await self._fetch_schema())["action"]  # which takes no place at a full server
            self._acts = not is_of_tools(schema)
            if self._acts:
                self.tools = [_act_tool(schema)]

    async def _list_tools(self) -> None:
        self.tools = openai_tools(await self._client.list_tools())

    async def connect(self) -> None:
        """Open the session before the first reset. CapacityError: the server had no room for it in time."""
        await self._client.connect()

    async def _fetch_schema(self) -> dict[str, Any]:
        *fallbacks, last = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        for url in fallbacks:
            with suppress(ConnectionFailedError):
                return await fetch_schema(url, token=self.token, timeout_s=self.reset_timeout_s)
        return await fetch_schema(last, token=self.token, timeout_s=self.reset_timeout_s)

    async def reset(self, **options: Any) -> str:
        """Start an episode and return its first observation as text.

        Args:
            options: Options of the environment's reset, such as `seed`.

        Raises:
            ClientError: The episode could not be started within `reset_timeout_s`.
        """
        if self.failure is not None:
            await self._client.disconnect()  # a step that was too slow may still run in that session
        await self._retry(self._read_schema)
        self.done, self.failure, self.unscored, self.truncated = False, None, None, False
        result = await self._retry(self._begin, **options)
        return text_of_observation(result.observation)

    async def _begin(self, **options: Any) -> StepResult[Observation]:
        result = await self._client.reset(**options)
        self._return = 0.0
        self._record(result)
        if not self._acts:
            self.tools = []
            if not self.over:
                await self._list_tools()
                if not self.tools:
                    self.failure = "the environment offers no tools in this episode"
        return result

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text; for an invalid call, the error."""
        if self.failure is not None:
            return "error: the environment has failed; this episode does not count"
        if self.done:
            return "error: the episode is over"
        if self._acts and name != ACT:
            return f"error: there is no tool {name!r}; the only one is {ACT!r}"
        action = dict(arguments) if self._acts else CallToolAction(tool_name=name, arguments=dict(arguments))
        try:
            result = await self._client.step(action)
        except ValidationFailedError as error:
            return f"error: {error}"
        except ClientError as error:
            self.failure = f"{type(error).__name__}: {error}"
            return "error: the environment has failed; this episode does not count"
        self._record(result)
        if self._acts:
            return text_of_observation(result.observation)
        try:
            return _as_text(value_of(name, result))
        except ToolCallError as error:
            if error.error_type == ToolErrorType.TRANSPORT_ERROR:
                self.failure = str(error)
            return f"error: {error}"

    async def answer(self, text: str) -> str:
        """Execute the tool call in a policy's text and return its result; without a call, the expected format.

        Args:
            text: Text with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the last of which counts; or
                only the JSON.
        """
        try:
            name, arguments = read_call(text)
        except ValueError as error:
            return f"error: {error}"
        return await self.call(name, arguments)

    @property
    def instructions(self) -> str:
        """Instructions for a policy that gets no function schemas."""
        schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
        return f"{_CALL_FORMAT}\nThe tools, as JSON schemas:\n{schemas}"

    @property
    def reward(self) -> float | None:
        """The sum of the episode's rewards; None where the episode is unscored."""
        if self.failure is not None or self.unscored is not None:
            return None
        if not self.done and self.unfinished_reward is not None:
            return self.unfinished_reward
        return self._return

    def require_reward(self) -> float:
        """Return the reward; EnvironmentFailureError if the environment failed, or did not score the episode."""
        if (reward := self.reward) is None:
            raise EnvironmentFailureError(f"the episode has no reward: {self.failure or self.unscored}")
        return reward

    @property
    def over(self) -> bool:
        """Whether the episode is done or has failed."""
        return self.done or self.failure is not None

    async def close(self) -> None:
        """End the session. Idempotent."""
        await self._client.close()

    def _record(self, result: StepResult[Observation]) -> None:
        self.done, self.truncated = result.done, result.truncated
        self.failure = result.infrastructure_error
        self.unscored = self.unscored or result.unscored
        self._return += float(result.reward or 0.0)

    async def _retry(self, request: Any, **options: Any) -> Any:
        """Send a request, and repeat it after transient errors for up to `reset_timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline, backoff = loop.time() + self.reset_timeout_s, Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            try:
                return await request(**options)
            except (AccessRefusedError, AuthenticationError):
                raise
            except _TRANSIENT:
                if loop.time() + (pause_s := backoff.next_s()) > deadline:
                    raise
            await asyncio.sleep(pause_s)


@contextmanager
def dict_client(
    target: str, options: Mapping[str, Any]
) -> Iterator[tuple[SyncEnvClient[Any, Any, Any], dict[str, Any]]]:
    """Yield a client of dicts and its server's JSON schemas; if the block fails, the client is closed.

    Args:
        target: Target of `openenv_core.make`.
        options: Further arguments of the client.
    """
    client = make(target, client=GenericEnvClient, **options)
    try:
        headers = client.async_client._session.settings.request_headers  # which may come from env_vars
        yield client, shared_loop().run(fetch_schema, client.base_url, headers=headers)
    except BaseException:
        client.close()
        raise


def seats_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the seats of a game of several players, by its server's schemas; ConfigurationError if it has one."""
    try:
        items = schema["state"]["properties"]["seat"]["items"]
        return list(items["enum"] if "enum" in items else [items["const"]])
    except (KeyError, TypeError):
        raise ConfigurationError(
            "expected a game of several players, got an environment without seats"
        ) from None


async def fetch_schema(
    base_url: str,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Return the JSON schemas of a server's action, observation and state, from its `GET /schema`.

    Raises:
        ConnectionFailedError: No server answers, or it refuses this client (`AuthenticationError` and others).
        ProtocolError: The response holds no such schemas.
    """
    url = f"{http_url(base_url)}/schema"
    headers = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
    schema = None
    try:
        async with httpx.AsyncClient(
            headers=headers, timeout=timeout_s, proxy=proxy_for(url), trust_env=False, verify=tls_context()
        ) as http:
            reply = await http.get(url)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConnectionFailedError(f"no server answers at {redact_url(url)}: {error}") from error
    if reply.status_code >= 500 or reply.status_code == httpx.codes.TOO_MANY_REQUESTS:
        # A proxy answers so while the server behind it is away.
        raise ConnectionFailedError(f"no server answers at {redact_url(url)}: HTTP {reply.status_code}")
    if reply.status_code in (401, 403, 421):
        raise refusal(url, reply.status_code, reply.headers, reply.text, socket=False)
    if reply.status_code == httpx.codes.OK:
        with suppress(ValueError):
            schema = reply.json()
    if not isinstance(schema, dict) or not all(
        isinstance(schema.get(key), dict) for key in ("action", "observation")
    ):
        raise ProtocolError(
            f"{redact_url(url)} does not answer with schemas of actions and observations, but with HTTP "
            f"{reply.status_code}: {reply.text!r:.200}"
        )
    return schema


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of the last tool call in a text.

    Raises:
        ValueError: The text holds no valid call; the message is meant for the policy.
    """
    calls = _CALL.findall(text) or [text]
    try:
        call = from_json(calls[-1])  # refuses what could not be sent: lone surrogates, excessive nesting
    except ValueError:
        raise ValueError(f"there is no call of a tool in the answer. {_CALL_FORMAT}") from None
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f'a call has a "name" and "arguments", an object. {_CALL_FORMAT}')
    return name, arguments


def text_of_observation(observation: Observation) -> str:
    """Return an observation as text for a policy: its field `text` if it has one, else its own fields as JSON."""
    fields = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"}, exclude_none=True)
    text = fields.get("text")
    return text if isinstance(text, str) else _as_text(_without_pictures(fields))


def _without_pictures(value: Any) -> Any:
    """Return JSON with a short line for each picture, whose base64 no model of text can read."""
    if isinstance(value, dict):
        return {name: _without_pictures(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_pictures(part) for part in value]
    return (describe_picture(value) or value) if isinstance(value, str) else value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def resolve(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a JSON schema with its `$ref`, if any, resolved."""
    reference = schema.get("$ref", "")
    return {**definitions.get(reference.rpartition("/")[2], {}), **schema} if reference else schema


def _act_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function schema of the tool `act` for an action's JSON schema."""
    properties = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name in schema.get("required", ()) if name in properties],
        **{key: schema[key] for key in ("anyOf", "oneOf", "$defs") if key in schema},  # of a union of actions
    }
    description = schema.get("description") or "Take an action in the environment."
    return {
        "type": "function",
        "function": {"name": ACT, "description": description, "parameters": parameters},
    }
