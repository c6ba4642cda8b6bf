"""Every error that Ropewalk's core raises, as one tree.

    OpenEnvError
    ├── EnvironmentFailureError        raised by environments, inside the server
    │   ├── EpisodeOverError           a step after the end of the episode
    │   ├── LLMError                   a language model that is asked for a score, for one, gave no answer
    │   └── NotForkableError           a fork of an episode that cannot be forked
    ├── ClientError                    raised on the caller's side
    │   ├── ConnectionFailedError      no connection could be made
    │   │   ├── AuthenticationError    the server asks for a token, or for another one (401)
    │   │   └── AccessRefusedError     the server refuses this host name or origin (403, 421)
    │   ├── ConnectionLostError        the connection broke; its session is gone
    │   │   └── EpisodeLostError       and the episode cannot be played again on another server
    │   ├── RequestTimeoutError        no reply in time; the session lives on
    │   ├── ClientClosedError          the client was used after close()
    │   ├── ProtocolError              the peer does not speak the OpenEnv wire
    │   ├── ToolCallError              a tool, or the call of it, failed; the session lives on
    │   └── ServerError                the server answered with an error frame
    │       ├── ValidationFailedError  VALIDATION_ERROR, INVALID_JSON, UNKNOWN_TYPE: the request was refused
    │       ├── ExecutionError         EXECUTION_ERROR: the environment raised
    │       ├── CapacityError          CAPACITY_REACHED: every session is taken, for as long as was waited
    │       ├── FactoryError           FACTORY_ERROR: the environment's constructor raised
    │       ├── NotExecutedError       NOT_EXECUTED: cancelled, or too late, before it had begun
    │       └── SessionError           SESSION_ERROR: anything else
    ├── ConfigurationError             an impossible combination of settings, or a name that does not resolve
    └── ProviderError                  a server could not be started, watched or stopped
        ├── ServerStartError           it ended, or stayed silent, before it was healthy
        ├── EngineUnavailableError     there is no Docker engine, or it does not answer
        ├── EngineRefusedError         the engine answered, and said no
        ├── ImageNotFoundError         the engine has no image of that name
        └── OptionUnavailableError     the engine cannot give a container what an option asks for

A message says what was expected, what came, and what to do.

Some are builtin exceptions as well, those that callers of the released client catch: ConnectionFailedError and
ConnectionLostError are a ConnectionError, RequestTimeoutError is a TimeoutError, ServerError, ToolCallError and
ProviderError are a RuntimeError, ConfigurationError is a ValueError.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import ValidationError


class OpenEnvError(Exception):
    """The root: catch this to catch everything that Ropewalk raises on purpose."""


class EnvironmentFailureError(OpenEnvError):
    """Raised by an environment; the caller sees its text as `ExecutionError`."""


class EpisodeOverError(EnvironmentFailureError):
    """A step was asked for after the episode had ended."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message
            or "expected reset() after the end of an episode, got step(); call reset() to start a new one"
        )


class NotForkableError(EnvironmentFailureError):
    """This episode cannot be forked, where others of the environment can; the message says what to change."""


class LLMError(EnvironmentFailureError, RuntimeError):
    """A language model gave no valid answer in time."""


class ClientError(OpenEnvError):
    """Something went wrong between a client and its server."""


class ConnectionFailedError(ClientError, ConnectionError):
    """No connection could be made."""


class AuthenticationError(ConnectionFailedError):
    """The server lets in whoever has a token, and this client has none, or a wrong one."""


class AccessRefusedError(ConnectionFailedError):
    """The server does not serve under this host name, or not for this origin."""


class ConnectionLostError(ClientError, ConnectionError):
    """The connection broke while in use. The session, and with it the episode, is gone."""


class EpisodeLostError(ConnectionLostError):
    """The server that an episode was played on is gone, and no other can go on with it.

    Its environment does not declare itself deterministic, it was played again and something was answered otherwise,
    it was too long to be kept, or no server was to be had. The message says which. `reset` starts a new episode.
    """


class RequestTimeoutError(ClientError, TimeoutError):
    """No reply came in time. The session and its episode live on.

    The environment may still do what it was asked. Its late reply is dropped when it comes, and is never taken
    for that of a later request, which waits until the environment is done with this one.
    """


class ClientClosedError(ClientError):
    """The client was used after it had been closed."""


class ProtocolError(ClientError):
    """The peer sent something that is not the OpenEnv wire."""


class ToolCallError(ClientError, RuntimeError):
    """A tool, or the call of it, failed. The session and its episode live on, unless the tool has ended that.

    Attributes:
        tool_name: Which tool.
        error_type: How, as `openenv_core.tools.ToolErrorType` has it: "invalid_args", "timeout" and so on.
        message: Why, in the server's own words.
        step_result: What the step came to, with its reward; None where the call was no step.
    """

    def __init__(self, tool_name: str, error_type: str, message: str, step_result: Any = None) -> None:
        super().__init__(f"tool {tool_name!r} failed ({error_type}): {message}")
        self.tool_name = tool_name
        self.error_type = error_type
        self.message = message
        self.step_result = step_result


class ServerError(ClientError, RuntimeError):
    """The server answered with an error frame.

    Attributes:
        message: The server's own text.
        code: The released error code, for example `EXECUTION_ERROR`.
        data: Every key of the error frame, those above included.
    """

    def __init__(self, message: str, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.message = message
        self.code = code
        self.data: dict[str, Any] = dict(data or {})


class ValidationFailedError(ServerError):
    """The server refused the request. The session lives on.

    Attributes:
        errors: One entry a fault, each with `type`, `loc` and `msg` as pydantic reports them.
    """

    def __init__(self, message: str, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        errors = (data or {}).get("errors")
        self.errors: list[dict[str, Any]] = (
            [dict(e) for e in errors if isinstance(e, Mapping)] if isinstance(errors, Sequence) else []
        )
        details = "; ".join(
            f"{_format_location(e.get('loc'))}: {e.get('msg', e.get('type', '?'))}" for e in self.errors
        )
        super().__init__(f"{message} ({details})" if details else message, code, data)


def _format_location(loc: object) -> str:
    """Return where a fault is; a peer may send anything."""
    return ".".join(str(key) for key in loc) if isinstance(loc, (list, tuple)) and loc else "message"


class ExecutionError(ServerError):
    """The environment raised an exception; `message` is its text. The session lives on."""


class CapacityError(ServerError):
    """Every session of the server is taken.

    Attributes:
        active_sessions: How many sessions the server held, where it said so.
        max_sessions: How many it allows, where it said so.
        retry_after_s: Seconds until it is worth another try, where it said so.
        place: The last known place in its queue, where it said so.
        waited_s: Seconds that this client, or the server for it, has waited; None where neither did.
    """

    def __init__(self, message: str, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, code, data)
        self.active_sessions: int | None = self.data.get("active_sessions")
        self.max_sessions: int | None = self.data.get("max_sessions")
        self.retry_after_s: float | None = self.data.get("retry_after_s")
        self.place: int | None = self.data.get("place")
        self.waited_s: float | None = self.data.get("waited_s")


class FactoryError(ServerError):
    """The environment's constructor raised on the server.

    Attributes:
        factory_name: The class or factory that raised, where the server said so.
    """

    def __init__(self, message: str, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, code, data)
        self.factory_name: str | None = self.data.get("factory_name")


class NotExecutedError(ServerError):
    """The request was cancelled, or its deadline was over, before it had begun: it did not happen."""


class SessionError(ServerError):
    """The session could not be made or kept, for a reason the server gives in its text."""


class ConfigurationError(OpenEnvError, ValueError):
    """Settings that cannot work together, or a name that does not resolve."""


class ProviderError(OpenEnvError, RuntimeError):
    """A server could not be started, watched or stopped."""


class ServerStartError(ProviderError):
    """The server ended, or stayed silent, before it was healthy.

    Attributes:
        output: The last lines that it printed.
    """

    def __init__(self, message: str, output: str = "") -> None:
        tail = output.rstrip()
        super().__init__(f"{message}\n--- the server's last output ---\n{tail}" if tail else message)
        self.output = output


class EngineUnavailableError(ProviderError):
    """There is no Docker engine, or it does not answer."""


class EngineRefusedError(ProviderError):
    """The Docker engine refused a request.

    Attributes:
        status: The HTTP status of its answer.
        reason: Its own words.
    """

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ImageNotFoundError(ProviderError):
    """The Docker engine has no image of that name."""


class OptionUnavailableError(ProviderError):
    """The Docker engine cannot give a container what an option asks for: GPUs, a limit, a network."""


@contextmanager
def installed_with(extra: str, expected: str, *packages: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that names the extra to install.

    Args:
        extra: The extra.
        expected: What is expected, in words.
        packages: The modules that the extra brings; by default whatever is missing.
    """
    try:
        yield
    except ImportError as error:
        if packages and error.name not in packages:
            raise
        raise ConfigurationError(
            f"expected {expected}, got: {error}; pip install 'ropewalk[{extra}]'"
        ) from error


def lazy_names(module: dict[str, Any], places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that imports names from their modules on first access."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        module[name] = value = getattr(import_module(places[name]), name)
        return value

    return find


def former_names(module: dict[str, Any], names: Mapping[str, str]) -> Callable[..., Any]:
    """Return a module's `__getattr__` that finds errors by the names that they had before 0.2, with a warning.

    Args:
        module: Its globals.
        names: New names by old ones.

    Returns:
        `find(name, stacklevel=2)`: a module with a `__getattr__` of its own passes 3, so that its caller is warned.
    """

    def find(name: str, stacklevel: int = 2) -> Any:
        if name not in names:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        warnings.warn(f"{name} is now called {names[name]}", DeprecationWarning, stacklevel=stacklevel)
        return module[names[name]]

    return find


FORMER_NAMES: Final = {
    "AccessRefused": "AccessRefusedError",
    "AuthenticationFailed": "AuthenticationError",
    "CapacityReached": "CapacityError",
    "ClientClosed": "ClientClosedError",
    "ConnectionFailed": "ConnectionFailedError",
    "ConnectionLost": "ConnectionLostError",
    "EngineRefused": "EngineRefusedError",
    "EngineUnavailable": "EngineUnavailableError",
    "EnvironmentFailure": "EnvironmentFailureError",
    "EpisodeOver": "EpisodeOverError",
    "ExecutionFailed": "ExecutionError",
    "FactoryFailed": "FactoryError",
    "ImageNotFound": "ImageNotFoundError",
    "OptionUnavailable": "OptionUnavailableError",
    "RequestTimeout": "RequestTimeoutError",
    "ServerStartFailed": "ServerStartError",
    "SessionFailed": "SessionError",
    "ToolCallFailed": "ToolCallError",
    "ValidationFailed": "ValidationFailedError",
}

__getattr__ = former_names(globals(), FORMER_NAMES)


MAX_FAULTS: Final = 8
"""How many faults of a model one message tells."""


def describe_faults(error: "ValidationError", whole: str) -> str:
    """Return what pydantic found wrong, as `place: what; ...`, without the values, which may be secrets.

    Args:
        error: What a model raised.
        whole: What to call the model where a fault is nobody's field.
    """
    details = error.errors(include_url=False, include_input=False, include_context=False)
    faults = [
        f"{'.'.join(map(str, fault['loc'])) or whole}: {fault['msg']}" for fault in details[:MAX_FAULTS]
    ]
    if len(details) > MAX_FAULTS:
        faults.append(f"and {len(details) - MAX_FAULTS} more")
    return "; ".join(faults)
