"""The tree of errors that Ropewalk's core raises.

    OpenEnvError
    ├── EnvironmentFailureError        raised by environments, inside the server
    │   ├── EpisodeOverError           a step after the end of the episode
    │   ├── LLMError                   a language model, for example a judge's, gave no answer
    │   │   └── NoScoreError           or one without a valid score
    │   └── NotForkableError           a fork of an episode that cannot be forked
    ├── ClientError                    raised by the client
    │   ├── ConnectionFailedError      no connection could be made
    │   │   ├── AuthenticationError    the token is missing or wrong (401)
    │   │   └── AccessRefusedError     the server rejects this host name or origin (403, 421)
    │   ├── ConnectionLostError        the connection broke; its session is gone
    │   │   └── EpisodeLostError       and the episode cannot be replayed on another server
    │   ├── RequestTimeoutError        no reply in time; the session remains open
    │   ├── ClientClosedError          the client was used after close()
    │   ├── ProtocolError              the peer does not speak the OpenEnv protocol
    │   ├── ToolCallError              a tool, or the call of it, failed; the session remains open
    │   └── ServerError                the server replied with an error frame
    │       ├── ValidationFailedError  VALIDATION_ERROR, INVALID_JSON, UNKNOWN_TYPE: the request was rejected
    │       ├── ExecutionError         EXECUTION_ERROR: the environment raised
    │       ├── CapacityError          CAPACITY_REACHED: no session became free within the wait
    │       ├── FactoryError           FACTORY_ERROR: the environment's constructor raised
    │       ├── NotExecutedError       NOT_EXECUTED: cancelled, or past its deadline, before it started
    │       └── SessionError           SESSION_ERROR: anything else
    ├── ConfigurationError             an impossible combination of settings, or a name that does not resolve
    └── ProviderError                  a server could not be started, monitored or stopped
        ├── ServerStartError           it exited, or did not become healthy in time
        ├── EngineUnavailableError     there is no Docker engine, or it does not respond
        ├── EngineRefusedError         the engine rejected a request
        ├── ImageNotFoundError         the engine has no image of that name
        └── OptionUnavailableError     the engine does not support a container option

Messages say what was expected, what was received and what to do.

Some also derive from builtin exceptions, which callers of the released client catch: ConnectionFailedError and
ConnectionLostError from ConnectionError, RequestTimeoutError from TimeoutError, ServerError, ToolCallError and
ProviderError from RuntimeError, ConfigurationError from ValueError.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import ValidationError


class PicklableError(Exception):
    """An exception that keeps its text and attributes when it is pickled, whatever its `__init__` takes.

    Exception itself calls `__init__` with the message only, so that a process pool that receives the error breaks.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[PicklableError], args: tuple[Any, ...]) -> PicklableError:
    # Named, as `kind.__new__` is that of the first builtin parent only.
    error = (OSError if issubclass(kind, OSError) else Exception).__new__(kind)
    error.args = args
    return error


class OpenEnvError(PicklableError):
    """Base class of all errors that Ropewalk raises on purpose."""


class EnvironmentFailureError(OpenEnvError):
    """Raised by an environment; the client raises `ExecutionError` with its message."""


class EpisodeOverError(EnvironmentFailureError):
    """`step` was called after the episode had ended."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message
            or "expected reset() after the end of an episode, got step(); call reset() to start a new one"
        )


class NotForkableError(EnvironmentFailureError):
    """This episode cannot be forked, although others of the environment can; the message says what to change."""


class LLMError(EnvironmentFailureError, RuntimeError):
    """A language model gave no valid answer in time."""


class NoScoreError(LLMError):
    """A judge's answer has no valid score: the step is unscored."""


class ClientError(OpenEnvError):
    """A failure between a client and its server."""


class ConnectionFailedError(ClientError, ConnectionError):
    """No connection could be made."""


class AuthenticationError(ConnectionFailedError):
    """The server requires a token, and this client's is missing or wrong."""


class AccessRefusedError(ConnectionFailedError):
    """The server rejects this host name or origin."""


class ConnectionLostError(ClientError, ConnectionError):
    """The connection broke while in use. The session and its episode are gone."""


class EpisodeLostError(ConnectionLostError):
    """The server of an episode is gone, and the episode cannot continue on another.

    Either the environment does not declare itself deterministic, the replay diverged, the episode was too long to be
    recorded, or no server was available. The message says which. `reset` starts a new episode.
    """


class RequestTimeoutError(ClientError, TimeoutError):
    """No reply came in time. The session and its episode remain open.

    The environment may still execute the request. A late reply is discarded and never mistaken for that of a later
    request, which waits until the environment has finished this one.
    """


class ClientClosedError(ClientError):
    """The client was used after it had been closed."""


class ProtocolError(ClientError):
    """The peer sent something that is not part of the OpenEnv protocol."""


class ToolCallError(ClientError, RuntimeError):
    """A tool, or the call of it, failed. The session and its episode remain open, unless the tool ended the episode.

    Attributes:
        tool_name: The tool's name.
        error_type: A value of `openenv_core.tools.ToolErrorType`, such as "invalid_args" or "timeout".
        message: The server's message.
        step_result: The step's result, with its reward; None if the call was not a step.
    """

    def __init__(self, tool_name: str, error_type: str, message: str, step_result: Any = None) -> None:
        super().__init__(f"tool {tool_name!r} failed ({error_type}): {message}")
        self.tool_name = tool_name
        self.error_type = error_type
        self.message = message
        self.step_result = step_result


class ServerError(ClientError, RuntimeError):
    """The server replied with an error frame.

    Attributes:
        message: The server's message.
        code: The released error code, for example `EXECUTION_ERROR`.
        data: All keys of the error frame, including the two above.
    """

    def __init__(self, message: str, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.message = message
        self.code = code
        self.data: dict[str, Any] = dict(data or {})


class ValidationFailedError(ServerError):
    """The server rejected the request. The session remains open.

    Attributes:
        errors: One entry per error, with `type`, `loc` and `msg` as pydantic reports them.
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
    """Format pydantic's `loc`; a peer may have sent anything."""
    return ".".join(str(key) for key in loc) if isinstance(loc, (list, tuple)) and loc else "message"


class ExecutionError(ServerError):
    """The environment raised an exception; `message` is its text. The session remains open."""


class CapacityError(ServerError):
    """All sessions of the server are in use.

    Each attribute is None if the server did not send it.

    Attributes:
        active_sessions: Number of open sessions.
        max_sessions: Maximum number of sessions.
        retry_after_s: Seconds after which to retry.
        place: Last known position in the server's queue.
        waited_s: Seconds that this client, or the server on its behalf, waited; None if neither did.
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
        factory_name: The class or factory that raised; None if the server did not send it.
    """

    def __init__(self, message: str, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, code, data)
        self.factory_name: str | None = self.data.get("factory_name")


class NotExecutedError(ServerError):
    """The request was cancelled, or its deadline passed, before it started; it was not executed."""


class SessionError(ServerError):
    """The session could not be opened or kept; the server's message says why."""


class ConfigurationError(OpenEnvError, ValueError):
    """Incompatible settings, or a name that does not resolve."""


class ProviderError(OpenEnvError, RuntimeError):
    """A server could not be started, monitored or stopped."""


class ServerStartError(ProviderError):
    """The server exited, or did not become healthy in time.

    Attributes:
        output: The last lines of its output.
    """

    def __init__(self, message: str, output: str = "") -> None:
        tail = output.rstrip()
        super().__init__(f"{message}\n--- the server's last output ---\n{tail}" if tail else message)
        self.output = output


class EngineUnavailableError(ProviderError):
    """There is no Docker engine, or it does not respond."""


class EngineRefusedError(ProviderError):
    """The Docker engine rejected a request.

    Attributes:
        status: The HTTP status of its response.
        reason: The engine's message.
    """

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ImageNotFoundError(ProviderError):
    """The Docker engine has no image of that name."""


class OptionUnavailableError(ProviderError):
    """The Docker engine does not support a container option: GPUs, a limit, a network."""


@contextmanager
def installed_with(extra: str, expected: str, *packages: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that names the extra to install.

    Args:
        extra: Name of the extra.
        expected: What the message says was expected.
        packages: Modules that the extra installs; without any, every failed import is converted.
    """
    try:
        yield
    except ImportError as error:
        if packages and error.name not in packages:
            raise
        raise ConfigurationError(
            f"expected {expected}, got: {error}; pip install 'ropewalk[{extra}]'"
        ) from error


def make_lazy_getattr(module: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that imports names from their modules on first access."""

    def resolve(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        module[name] = value = getattr(import_module(modules[name]), name)
        return value

    return resolve


MAX_FAULTS: Final = 8
"""Maximum number of validation errors in one message."""


def describe_faults(error: "ValidationError", root_name: str) -> str:
    """Format pydantic's errors as `field: message; ...`, without the values, which may be secrets.

    Args:
        error: The validation error.
        root_name: Name to show for an error that belongs to no field.
    """
    details = error.errors(include_url=False, include_input=False, include_context=False)
    faults = [
        f"{'.'.join(map(str, fault['loc'])) or root_name}: {fault['msg']}" for fault in details[:MAX_FAULTS]
    ]
    if len(details) > MAX_FAULTS:
        faults.append(f"and {len(details) - MAX_FAULTS} more")
    return "; ".join(faults)
