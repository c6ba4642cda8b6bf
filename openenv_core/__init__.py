"""Ropewalk's core: the environment interface, clients and providers.

Importing this package is cheap: it loads nothing heavier than pydantic. Clients and providers are imported on first
access.
"""

from typing import TYPE_CHECKING, Any

from openenv_core.environment import Environment
from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    EngineRefusedError,
    EngineUnavailableError,
    EnvironmentFailureError,
    EpisodeLostError,
    EpisodeOverError,
    ExecutionError,
    FactoryError,
    ImageNotFoundError,
    NotExecutedError,
    OpenEnvError,
    OptionUnavailableError,
    ProtocolError,
    ProviderError,
    RequestTimeoutError,
    ServerError,
    ServerStartError,
    SessionError,
    ToolCallError,
    ValidationFailedError,
    make_lazy_getattr,
)
from openenv_core.outcomes import (
    Outcome,
    infrastructure_failure,
    is_infrastructure_failure,
    outcome_of,
    unscored_reason,
)
from openenv_core.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    Observation,
    ResetResult,
    State,
    StepResult,
)

if TYPE_CHECKING:
    from openenv_core.client import EnvClient, GenericAction, GenericEnvClient, MCPToolClient, SyncEnvClient
    from openenv_core.making import make
    from openenv_core.multi_agent import MultiAgentEnvironment
    from openenv_core.pictures import Picture
    from openenv_core.providers import ContainerOptions, DockerPool, LocalDockerProvider, LocalProcessProvider

__all__ = [
    "AccessRefusedError",
    "Action",
    "AuthenticationError",
    "CapacityError",
    "ClientClosedError",
    "ClientError",
    "ConcurrencyConfig",
    "ConfigurationError",
    "ConnectionFailedError",
    "ConnectionLostError",
    "ContainerOptions",
    "DockerPool",
    "EngineRefusedError",
    "EngineUnavailableError",
    "EnvClient",
    "Environment",
    "EnvironmentFailureError",
    "EnvironmentMetadata",
    "EpisodeLostError",
    "EpisodeOverError",
    "ExecutionError",
    "FactoryError",
    "GenericAction",
    "GenericEnvClient",
    "ImageNotFoundError",
    "LocalDockerProvider",
    "LocalProcessProvider",
    "MCPToolClient",
    "MultiAgentEnvironment",
    "NotExecutedError",
    "Observation",
    "OpenEnvError",
    "OptionUnavailableError",
    "Outcome",
    "Picture",
    "ProtocolError",
    "ProviderError",
    "RequestTimeoutError",
    "ResetResult",
    "ServerError",
    "ServerStartError",
    "SessionError",
    "State",
    "StepResult",
    "SyncEnvClient",
    "ToolCallError",
    "ValidationFailedError",
    "infrastructure_failure",
    "is_infrastructure_failure",
    "make",
    "outcome_of",
    "unscored_reason",
]

_LAZY = {
    "EnvClient": "openenv_core.client",
    "GenericAction": "openenv_core.client",
    "GenericEnvClient": "openenv_core.client",
    "MCPToolClient": "openenv_core.client.tools",
    "SyncEnvClient": "openenv_core.client",
    "make": "openenv_core.making",
    "MultiAgentEnvironment": "openenv_core.multi_agent",
    "Picture": "openenv_core.pictures",
    "ContainerOptions": "openenv_core.providers",
    "DockerPool": "openenv_core.providers",
    "LocalDockerProvider": "openenv_core.providers",
    "LocalProcessProvider": "openenv_core.providers",
}

_import_lazily = make_lazy_getattr(globals(), _LAZY)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("ropewalk")
        except PackageNotFoundError:
            return "(not installed)"
    return _import_lazily(name)


def __dir__() -> list[str]:
    return [name for name in globals() if name.startswith("__")] + __all__
