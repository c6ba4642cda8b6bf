"""What a server of tools can be told: environment variables that begin with MCP_TOOLS_."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from openenv_core.errors import ConfigurationError

from .servers import ENVIRON, MAX_SECONDS, HttpServer, ServerSpec, StdioServer

PREFIX: Final = "MCP_TOOLS_"
CONFIG: Final = f"{PREFIX}CONFIG"
SERVERS: Final = f"{PREFIX}SERVERS"

KEY: Final = "mcpServers"
MAX_CONFIG_BYTES: Final = 1 << 20

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
"""What a server may be called: its name becomes part of the names of tools."""

DEMO: Final = "demo"
_DEMO_SCRIPT: Final = Path(__file__).parents[1] / "demo_server.py"

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpToolsSettings:
    """The settings of one environment's server.

    Attributes:
        servers: By name, in the order of the configuration.
        calls: How many calls an episode has.
        time_s: How long an episode may take, from its reset on.
        starts: How many tool servers start at once.
    """

    servers: Mapping[str, ServerSpec]
    calls: int = 256
    time_s: float = MAX_SECONDS
    starts: int = 8

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "McpToolsSettings":
        """Read the settings from environment variables. Without a configuration there is a small server to try.

        Raises:
            ConfigurationError: A value cannot be used.
        """
        path, inline = environ.get(CONFIG, "").strip(), environ.get(SERVERS, "").strip()
        if path and inline:
            raise ConfigurationError(f"expected {CONFIG} or {SERVERS}, got both; leave one of them out")
        found: dict[str, Any] = {}
        for name, read in (("calls", _count), ("time_s", _seconds), ("starts", _count)):
            variable = f"{PREFIX}{name.upper()}"
            if text := environ.get(variable, "").strip():
                found[name] = read(variable, text)
        if path:
            return cls(servers=_servers(CONFIG, _content(path), environ), **found)
        if inline:
            return cls(servers=_servers(SERVERS, inline, environ), **found)
        return cls(servers=demo(), **found)


def demo() -> dict[str, ServerSpec]:
    """Return what is served where nothing is configured."""
    return {DEMO: StdioServer(command=sys.executable, args=("-I", "-S", str(_DEMO_SCRIPT)))}


def servers_of(
    config: object, environ: Mapping[str, str], source: str = "the configuration"
) -> dict[str, ServerSpec]:
    """Read a configuration that was JSON.

    Raises:
        ConfigurationError: It is not what it should be; says where, and repeats no value.
    """
    if not isinstance(config, Mapping) or set(config) != {KEY} or not isinstance(config[KEY], Mapping):
        got = ", ".join(map(repr, config))[:200] if isinstance(config, Mapping) else type(config).__name__
        raise ConfigurationError(
            f'expected {{"{KEY}": {{NAME: {{...}}}}}} in {source}, got {got or "nothing"}'
        )
    entries = config[KEY]
    if not entries:
        raise ConfigurationError(f"expected at least one server below {KEY} in {source}, got none")
    found: dict[str, ServerSpec] = {}
    for name, entry in entries.items():
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"expected names of servers of 1 to 32 letters, digits, dashes and underscores in {source}, got "
                f"{name[:80]!r}; its name becomes part of the names of its tools"
            )
        found[name] = _server(f"{KEY}.{name}", entry, environ, source)
    return found


def _servers(variable: str, text: str, environ: Mapping[str, str]) -> dict[str, ServerSpec]:
    try:
        config = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"expected JSON in {variable}, got: {error}") from None
    return servers_of(config, environ, variable)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"one key twice, among {', '.join(found)}"[:200])
    return found


def _server(place: str, entry: object, environ: Mapping[str, str], source: str) -> ServerSpec:
    if not isinstance(entry, Mapping) or ("command" in entry) == ("url" in entry):
        raise ConfigurationError(
            f'expected either "command" (a process) or "url" (streamable HTTP) in {place} of {source}, got '
            f"{', '.join(map(repr, entry))[:200] if isinstance(entry, Mapping) else type(entry).__name__}"
        )
    model: type[StdioServer] | type[HttpServer] = StdioServer if "command" in entry else HttpServer
    try:
        return model.model_validate(entry, context={ENVIRON: environ})
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        faults = "; ".join(_fault(place, fault, model) for fault in errors)
        raise ConfigurationError(f"{source}: {faults}"[:2000]) from None


def _fault(place: str, fault: Any, model: type[BaseModel]) -> str:
    where = ".".join((place, *map(str, fault["loc"])))
    if fault["type"] == "extra_forbidden":
        fields = model.model_fields
        if "ropewalk" in fault["loc"]:
            fields = model.model_fields["ropewalk"].annotation.model_fields  # type: ignore[union-attr]
        return f"expected no key but {', '.join(fields)}, got {where}"
    return f"{where}: {fault['msg'].removeprefix('Value error, ')}"


def _content(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"expected a readable file in {CONFIG}, got: {error}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigurationError(
            f"expected at most {MAX_CONFIG_BYTES} bytes in the file of {CONFIG}, got more"
        )
    return data.decode(errors="replace")


def _count(variable: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or not 1 <= int(text) <= 1_000_000:
        raise ConfigurationError(
            f"expected {variable} to be a whole number from 1 to 1000000, got {text[:80]!r}"
        )
    return int(text)


def _seconds(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_SECONDS:
        raise ConfigurationError(
            f"expected {variable} to be a number of seconds above 0, at most {MAX_SECONDS:g}, got {text[:80]!r}"
        )
    return value
