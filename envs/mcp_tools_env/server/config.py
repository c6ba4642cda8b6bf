"""The operator's configuration: tool servers, their permissions, and the budgets of an episode.

Servers are entries of `mcpServers`; all other settings are environment variables with the prefix MCP_TOOLS_.
"""

import ipaddress
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from openenv_core.errors import ConfigurationError

from .upstream.addresses import check_address
from .upstream.errors import AddressRefusedError

SESSION_DIR: Final = "SESSION_DIR"
"""The placeholder for the session's private folder, which is removed when the session ends."""

_PLACEHOLDER: Final = re.compile(r"(\$?)\$\{([^}]*)\}")
_ENV_PREFIX: Final = "env:"


def _expand(value: Any, info: ValidationInfo) -> Any:
    """Substitute `${env:NAME}` by environment variables; `${SESSION_DIR}` is substituted later, for each session."""
    environ: Mapping[str, str] = (info.context or {}).get(ENVIRON, {})
    if isinstance(value, tuple):
        return tuple(_expand_text(text, environ) for text in value)
    if isinstance(value, dict):
        return {key: _expand_text(text, environ) for key, text in value.items()}
    return _expand_text(value, environ) if isinstance(value, str) else value


def _expand_text(text: str, environ: Mapping[str, str]) -> str:

    def expand(match: re.Match[str]) -> str:
        name = match[2]
        if match[1] or name == SESSION_DIR:
            return match[0]
        if not name.startswith(_ENV_PREFIX):
            raise ValueError(
                f"expected ${{{SESSION_DIR}}} or ${{{_ENV_PREFIX}NAME}}, got ${{{name}}}; write $${{{name}}} where it "
                "is meant as it stands"
            )
        variable = name.removeprefix(_ENV_PREFIX)
        if variable not in environ:
            raise ValueError(
                f"expected the variable {variable} to be set, for {match[0]}; set it for the environment's server"
            )
        return environ[variable].replace("${", "$${")

    return _PLACEHOLDER.sub(expand, text)


def fill_folder(text: str, folder: str) -> str:
    """Substitute `${SESSION_DIR}` by the session's folder, and unescape `$${` to `${`."""
    return _PLACEHOLDER.sub(lambda match: match[0][1:] if match[1] else folder, text)


def _needs_folder(text: str) -> bool:
    return any(not match[1] and match[2] == SESSION_DIR for match in _PLACEHOLDER.finditer(text))


ENVIRON: Final = "environ"
"""The key in pydantic's validation context for the environment variables of the environment's server."""

MAX_SECONDS: Final = 3600.0

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Patterns: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=256)
]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ServerPolicy(_Entry):
    """Our own settings in a server's entry, under the key "ropewalk".

    Attributes:
        allow: Glob patterns (such as `read_*`) of the tools to offer, by the server's own names for them.
        deny: Glob patterns of the tools not to offer; takes precedence over `allow`.
        prefix: The prefix of its tools' names. By default empty if it is the only server, else the server's name and
            two underscores.
        timeout_s: The timeout of a call.
        calls: The maximum number of calls to it in an episode; None: limited only by the episode's budget.
        start_timeout_s: The timeout of its start, including the listing of its tools.
        restart: Whether a dead server is restarted for the next call; otherwise its death ends the episode.
        max_restarts: The maximum number of restarts in an episode.
        max_result_bytes: The maximum size of a call's result; the rest is cut off, and the observation says so.
        protocol: "handshake": MCP up to 2025-11-25, in which each connection has its own session. "stateless":
            2026-07-28. "auto": "handshake", or "stateless" if the server supports only that.
        allow_private: Whether addresses of this machine and of private networks are allowed.
        env_pass: Environment variables of the environment's server to pass on to the process.
    """

    allow: Patterns = ("*",)
    deny: Patterns = ()
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,32}$")] | None = None
    timeout_s: Seconds = 30.0
    calls: Annotated[int, Field(ge=1)] | None = None
    start_timeout_s: Seconds = 30.0
    restart: bool = True
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    max_result_bytes: Annotated[int, Field(ge=1024, le=16 << 20)] = 1 << 20
    protocol: Literal["auto", "handshake", "stateless"] = "auto"
    allow_private: bool = False
    env_pass: Annotated[tuple[str, ...], Field(max_length=256)] = ()


class StdioServer(_Entry):
    """A server that runs as a process of the session.

    Attributes:
        command: The program; looked up on the PATH unless it is a path.
        args: The program's arguments.
        env: Environment variables, in addition to a few harmless ones.
        cwd: The working directory; by default the session's folder.
    """

    type: Literal["stdio"] = "stdio"
    command: Annotated[str, Field(min_length=1)]
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    cwd: Annotated[str, Field(min_length=1)] | None = None
    ropewalk: ServerPolicy = ServerPolicy()

    @field_validator("command", "args", "env", "cwd")
    @classmethod
    def _expand_variables(cls, value: Any, info: ValidationInfo) -> Any:
        return _expand(value, info)

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if _needs_folder(self.command):
            raise ValueError("expected a command that is there before the session, got ${SESSION_DIR} in it")
        if any(
            "\0" in text for text in (self.command, *self.args, *self.env, *self.env.values(), self.cwd or "")
        ):
            raise ValueError("expected text without NUL characters in command, args, env and cwd")
        if invalid_names := [name for name in self.env if not name or "=" in name]:
            raise ValueError(f"expected names of variables in env, got {invalid_names[0]!r}")
        if self.ropewalk.allow_private:
            raise ValueError("expected allow_private for a url, got it for a command; leave it out")
        return self


class HttpServer(_Entry):
    """A server at a URL, to which each session has its own connection.

    Attributes:
        url: The MCP endpoint.
        headers: The headers of every request.
    """

    type: Literal["http", "streamable-http"] = "http"
    url: str
    headers: dict[str, str] = Field(default_factory=dict)
    ropewalk: ServerPolicy = ServerPolicy()

    @field_validator("url", "headers")
    @classmethod
    def _expand_variables(cls, value: Any, info: ValidationInfo) -> Any:
        value = _expand(value, info)
        texts = [value] if isinstance(value, str) else list(value.values())
        if any(_needs_folder(text) for text in texts):
            raise ValueError("expected ${SESSION_DIR} in args, env or cwd of a command, got it here")
        # Nothing here depends on the session, so unescape it now.
        return (
            fill_folder(value, "")
            if isinstance(value, str)
            else {key: fill_folder(text, "") for key, text in value.items()}
        )

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        parts = urlsplit(self.url)
        try:
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"expected an address for url, got one that cannot be read: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError("expected a url that begins with http:// or https:// and names a host")
        if parts.username is not None or parts.password is not None:
            raise ValueError("expected a url without a user and a password; put credentials into headers")
        if any(
            not HEADER_NAME.fullmatch(name) or not (value.isascii() and value.isprintable())
            for name, value in self.headers.items()
        ):
            raise ValueError("expected headers of one line of ASCII, under names without spaces")
        if self.ropewalk.env_pass:
            raise ValueError("expected env_pass for a command, got it for a url; leave it out")
        if not self.ropewalk.allow_private:
            try:
                check_address(str(ipaddress.ip_address(host.strip("[]"))))
            except AddressRefusedError as error:
                raise ValueError(f"{error}; set ropewalk.allow_private where that is right") from None
            except ValueError:
                pass  # a host name: resolved and checked for each connection
        return self


ServerSpec: TypeAlias = StdioServer | HttpServer


PREFIX: Final = "MCP_TOOLS_"
CONFIG: Final = f"{PREFIX}CONFIG"
SERVERS: Final = f"{PREFIX}SERVERS"
KEY: Final = "mcpServers"
MAX_CONFIG_BYTES: Final = 1 << 20

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
"""The valid names of servers, which become part of tool names."""

_DEMO_SCRIPT: Final = Path(__file__).with_name("demo_server.py")


class McpToolsSettings(BaseModel):
    """The settings of the environment's server.

    Attributes:
        servers: The tool servers by name, in the order of the configuration.
        calls: The maximum number of calls in an episode.
        time_s: The maximum duration of an episode in seconds, from its reset.
        starts: The maximum number of tool servers that start at once.
    """

    model_config = ConfigDict(frozen=True)

    servers: dict[str, StdioServer | HttpServer]
    calls: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    time_s: Annotated[Seconds, Field(allow_inf_nan=False)] = MAX_SECONDS
    starts: Annotated[int, Field(ge=1, le=1_000_000)] = 8

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "McpToolsSettings":
        """Read the settings from environment variables. If no servers are configured, a small demo server is used.

        Raises:
            ConfigurationError: A value is invalid.
        """
        path, inline = environ.get(CONFIG, "").strip(), environ.get(SERVERS, "").strip()
        if path and inline:
            raise ConfigurationError(f"expected {CONFIG} or {SERVERS}, got both; leave one of them out")
        if path:
            servers = _parse_servers(CONFIG, _read_file(path), environ)
        elif inline:
            servers = _parse_servers(SERVERS, inline, environ)
        else:
            servers = {"demo": StdioServer(command=sys.executable, args=("-I", "-S", str(_DEMO_SCRIPT)))}
        values = {
            name: environ.get(f"{PREFIX}{name.upper()}", "").strip() for name in ("calls", "time_s", "starts")
        }
        try:
            return cls.model_validate(
                {"servers": servers, **{name: text for name, text in values.items() if text}}
            )
        except ValidationError as error:
            (fault, *_) = error.errors(include_url=False)
            variable = f"{PREFIX}{fault['loc'][0]}".upper()
            raise ConfigurationError(f"{variable}: {fault['msg']}, got {fault['input']!r:.80}") from None


def servers_of(
    config: object, environ: Mapping[str, str], source: str = "the configuration"
) -> dict[str, ServerSpec]:
    """Validate a parsed JSON configuration and return its servers by name.

    Raises:
        ConfigurationError: The configuration is invalid. The message says where, but repeats no values, which may be
            secret.
    """
    if not isinstance(config, Mapping) or set(config) != {KEY} or not isinstance(config[KEY], Mapping):
        got = ", ".join(map(repr, config))[:200] if isinstance(config, Mapping) else type(config).__name__
        raise ConfigurationError(
            f'expected {{"{KEY}": {{NAME: {{...}}}}}} in {source}, got {got or "nothing"}'
        )
    entries = config[KEY]
    if not entries:
        raise ConfigurationError(f"expected at least one server below {KEY} in {source}, got none")
    servers: dict[str, ServerSpec] = {}
    for name, entry in entries.items():
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"expected names of servers of 1 to 32 letters, digits, dashes and underscores in {source}, got "
                f"{name[:80]!r}; its name becomes part of the names of its tools"
            )
        servers[name] = _parse_server(f"{KEY}.{name}", entry, environ, source)
    return servers


def _parse_servers(variable: str, text: str, environ: Mapping[str, str]) -> dict[str, ServerSpec]:
    try:
        config = json.loads(text, object_pairs_hook=_require_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"expected JSON in {variable}, got: {error}") from None
    return servers_of(config, environ, variable)


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError(f"one key twice, among {', '.join(mapping)}"[:200])
    return mapping


def _parse_server(location: str, entry: object, environ: Mapping[str, str], source: str) -> ServerSpec:
    if not isinstance(entry, Mapping) or ("command" in entry) == ("url" in entry):
        raise ConfigurationError(
            f'expected either "command" (a process) or "url" (streamable HTTP) in {location} of {source}, got '
            f"{', '.join(map(repr, entry))[:200] if isinstance(entry, Mapping) else type(entry).__name__}"
        )
    model: type[StdioServer] | type[HttpServer] = StdioServer if "command" in entry else HttpServer
    try:
        return model.model_validate(entry, context={ENVIRON: environ})
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        faults = "; ".join(_describe_fault(location, fault, model) for fault in errors)
        raise ConfigurationError(f"{source}: {faults}"[:2000]) from None


def _describe_fault(location: str, fault: Any, model: type[BaseModel]) -> str:
    field_path = ".".join((location, *map(str, fault["loc"])))
    if fault["type"] == "extra_forbidden":
        fields = model.model_fields
        if "ropewalk" in fault["loc"]:
            fields = model.model_fields["ropewalk"].annotation.model_fields  # type: ignore[union-attr]
        return f"expected no key but {', '.join(fields)}, got {field_path}"
    return f"{field_path}: {fault['msg'].removeprefix('Value error, ')}"


def _read_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"expected a readable file in {CONFIG}, got: {error}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigurationError(f"expected at most {MAX_CONFIG_BYTES} bytes in {CONFIG}'s file, got more")
    return data.decode("utf-8-sig", errors="replace")
