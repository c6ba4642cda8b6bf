"""What released environment folders import, and what each name is here: data only.

A target is `module:attribute` of this package. Names whose part is not built yet are listed as such, so that an
import of one is answered with its name instead of a riddle. The names of the server's side are handed to
`install` by `servers`, since this package knows nobody above it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

RELEASED: Final = "openenv"
"""The released package's name for imports."""

FORMER: Final = "openenv_core"
"""Its name until 0.2, which is now ours: the same modules are found below it."""

_TYPES = "openenv_core.types:"
_TOOLS = "openenv_core.tools:"
_MCP_TYPES = "openenv_core.compat.types:"
_WIRE_TYPES = "openenv_core.compat.types:"
_RUBRICS = "openenv_core.rubrics:"
_WEB = "the web page"
_LLM = "clients of language models"
_PROVIDERS = (
    "hosts of containers that have no adapter here; openenv_core.providers has LocalDockerProvider and "
    "RemoteSandboxProvider, and a client takes any object of their shape as provider"
)
_CONTAINERS = "openenv_core.compat.containers:"
_SERVER = (
    "a server's own classes: create_app builds the server, openenv_core.protocol reads and writes its frames"
)


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the released package.

    Attributes:
        names: What each name is here.
        later: Names that are not provided, each with what it belongs to.
        also: Modules whose names it has too.
        package: Whether modules lie below it.
        rest: What every other name belongs to, where the whole module is not provided.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    later: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    package: bool = False
    rest: str | None = None


def _later(what: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, what)


MODULES: Final[Mapping[str, Module]] = {
    "openenv": Module(
        names={
            "GenericAction": "openenv_core:GenericAction",
            "GenericEnvClient": "openenv_core:GenericEnvClient",
            "SyncEnvClient": "openenv_core:SyncEnvClient",
        },
        also=("openenv.auto",),
        package=True,
    ),
    "openenv.core": Module(
        also=(
            "openenv.core.env_server",
            "openenv.core.env_client",
            "openenv.core.generic_client",
            "openenv.core.sync_client",
            "openenv.core.mcp_client",
            "openenv.core.llm_client",
        ),
        package=True,
    ),
    "openenv.core.client_types": Module(names={"StepResult": f"{_TYPES}StepResult"}),
    "openenv.core.env_client": Module(
        names={"EnvClient": "openenv_core:EnvClient", "StepResult": f"{_TYPES}StepResult"}
    ),
    "openenv.core.generic_client": Module(
        names={
            "GenericAction": "openenv_core:GenericAction",
            "GenericEnvClient": "openenv_core:GenericEnvClient",
        }
    ),
    "openenv.core.sync_client": Module(names={"SyncEnvClient": "openenv_core:SyncEnvClient"}),
    "openenv.core.mcp_client": Module(
        names=dict.fromkeys(("MCPClientBase", "MCPToolClient"), "openenv_core:MCPToolClient")
    ),
    "openenv.core.http_env_client": Module(
        later=_later(
            "release 0.1, whose clients and folders are not run here; `openenv init` of a later one makes them anew, "
            "and EnvClient(base_url, transport='http') talks to its servers",
            "HTTPEnvClient",
        )
    ),
    "openenv.core.env_server": Module(
        also=(
            "openenv.core.env_server.interfaces",
            "openenv.core.env_server.types",
            "openenv.core.env_server.http_server",
            "openenv.core.env_server.base_transforms",
            "openenv.core.env_server.exceptions",
            "openenv.core.env_server.mcp_types",
            "openenv.core.env_server.mcp_environment",
            "openenv.core.env_server.route_config",
            "openenv.core.env_server.serialization",
            "openenv.core.env_server.web_interface",
        ),
        package=True,
    ),
    "openenv.core.env_server.interfaces": Module(
        names={
            "Action": f"{_TYPES}Action",
            "Environment": "openenv_core.environment:Environment",
            "EnvironmentMetadata": f"{_TYPES}EnvironmentMetadata",
            "Message": "openenv_core.compat.types:Message",
            "ModelTokenizer": "openenv_core.compat.types:ModelTokenizer",
            "Observation": f"{_TYPES}Observation",
            "State": f"{_TYPES}State",
            "TaskProvider": "openenv_core.tasks:TaskProvider",
            "Transform": "openenv_core.environment:Transform",
        }
    ),
    "openenv.core.env_server.types": Module(
        names={
            "Action": f"{_TYPES}Action",
            "CodeExecResult": "openenv_core.compat.types:CodeExecResult",
            "ConcurrencyConfig": f"{_TYPES}ConcurrencyConfig",
            "EnvironmentMetadata": f"{_TYPES}EnvironmentMetadata",
            "Observation": f"{_TYPES}Observation",
            "State": f"{_TYPES}State",
        }
        | {
            name: f"{_WIRE_TYPES}{name}"
            for name in (
                "BaseMessage",
                "GetTaskRangeRequest",
                "GetTaskRequest",
                "HealthResponse",
                "HealthStatus",
                "ListTasksRequest",
                "NumTasksRequest",
                "ResetRequest",
                "ResetResponse",
                "SchemaResponse",
                "ServerMode",
                "StepRequest",
                "StepResponse",
                "WSCloseMessage",
                "WSErrorCode",
                "WSErrorResponse",
                "WSIncomingMessage",
                "WSObservationResponse",
                "WSResetMessage",
                "WSStateMessage",
                "WSStateResponse",
                "WSStepMessage",
            )
        },
        later=_later(_SERVER, "ServerCapacityStatus", "SessionInfo"),
    ),
    "openenv.core.env_server.http_server": Module(
        later={
            **_later(
                "the server's side: load the folder with `ropewalk serve`", "create_app", "create_fastapi_app"
            ),
            **_later(_SERVER, "HTTPEnvServer"),
        }
    ),
    "openenv.core.env_server.base_transforms": Module(
        names={
            "CompositeTransform": "openenv_core.environment:CompositeTransform",
            "NullTransform": "openenv_core.environment:NullTransform",
        }
    ),
    "openenv.core.env_server.exceptions": Module(
        names={
            "ConcurrencyConfigurationError": "openenv_core.errors:ConfigurationError",
            "OpenEnvError": "openenv_core.errors:OpenEnvError",
        },
        later=_later(
            _SERVER,
            "EnvironmentFactoryError",
            "SessionCapacityError",
            "SessionCreationError",
            "SessionNotFoundError",
        ),
    ),
    "openenv.core.env_server.mcp_types": Module(
        names={
            name: f"{_TOOLS}{name}"
            for name in (
                "CallToolAction",
                "CallToolObservation",
                "ListToolsAction",
                "ListToolsObservation",
                "RESERVED_TOOL_NAMES",
                "Tool",
                "ToolError",
                "ToolErrorType",
            )
        }
        | {
            name: f"{_MCP_TYPES}{name}"
            for name in (
                "JsonRpcError",
                "JsonRpcErrorCode",
                "JsonRpcRequest",
                "JsonRpcResponse",
                "McpMethod",
                "WSMCPMessage",
                "WSMCPResponse",
            )
        }
    ),
    "openenv.core.env_server.mcp_environment": Module(
        names={
            name: f"openenv_core.compat.mcp_environment:{name}"
            for name in ("MCPEnvironment", "MCP_TOOL_CALL_TIMEOUT", "get_server_tools")
        }
    ),
    "openenv.core.env_server.route_config": Module(later=_later(_SERVER, "GetEndpointConfig")),
    "openenv.core.env_server.serialization": Module(
        names={
            name: f"{_WIRE_TYPES}{name}"
            for name in (
                "deserialize_action",
                "deserialize_action_with_preprocessing",
                "serialize_observation",
            )
        }
    ),
    "openenv.core.env_server.web_interface": Module(
        later=_later(_WEB, "WebInterfaceManager", "create_web_interface_app"),
        names={"load_environment_metadata": f"{_WIRE_TYPES}load_environment_metadata"},
    ),
    "openenv.core.containers": Module(rest=_PROVIDERS, package=True),
    "openenv.core.containers.runtime": Module(
        later=_later(_PROVIDERS, "UVProvider"),
        also=("openenv.core.containers.runtime.providers",),
        rest=_PROVIDERS,
        package=True,
    ),
    "openenv.core.containers.runtime.providers": Module(
        names={
            name: f"{_CONTAINERS}{name}"
            for name in ("ContainerProvider", "LocalDockerProvider", "RuntimeProvider")
        },
        rest=_PROVIDERS,
    ),
    "openenv.core.rubrics": Module(
        also=(
            "openenv.core.rubrics.base",
            "openenv.core.rubrics.containers",
            "openenv.core.rubrics.trajectory",
            "openenv.core.rubrics.llm_judge",
        ),
        package=True,
    ),
    "openenv.core.rubrics.base": Module(names={"Rubric": f"{_RUBRICS}Rubric"}),
    "openenv.core.rubrics.containers": Module(
        names={
            name: f"{_RUBRICS}{name}"
            for name in ("Gate", "RubricDict", "RubricList", "Sequential", "WeightedSum")
        }
    ),
    "openenv.core.rubrics.llm_judge": Module(later=_later(_LLM, "LLMJudge")),
    "openenv.core.rubrics.trajectory": Module(
        names={
            name: f"{_RUBRICS}{name}"
            for name in ("ExponentialDiscountingTrajectoryRubric", "TrajectoryRubric")
        }
    ),
    "openenv.core.llm_client": Module(
        later=_later(
            _LLM,
            "AnthropicClient",
            "LLMClient",
            "LLMResponse",
            "OpenAIClient",
            "ToolCall",
            "create_llm_client",
        )
    ),
    "openenv.core.tools": Module(
        also=("openenv.core.tools.git_server_client", "openenv.core.tools.local_python_executor"),
        package=True,
    ),
    "openenv.core.tools.git_server_client": Module(
        names={name: f"openenv_core.compat.git_server:{name}" for name in ("GitServerClient", "RepoInfo")}
    ),
    "openenv.core.tools.local_python_executor": Module(
        names={"PyExecutor": "openenv_core.compat.executor:PyExecutor"}
    ),
    "openenv.core.utils": Module(rest="the released package's own helpers"),
    "openenv.core.harness": Module(
        names={
            name: f"openenv_core.compat.harness:{name}"
            for name in ("Message", "ResourceSession", "ResourceSessionFactory", "ToolResult", "VerifyResult")
        },
        rest="drivers of coding agents",
    ),
    "openenv.core.evals": Module(rest="evaluations"),
    "openenv.auto": Module(
        also=("openenv.auto.auto_action", "openenv.auto.auto_env"),
        rest="the released package's own ways of finding environments; openenv_core.make takes a name",
        package=True,
    ),
    "openenv.auto.auto_action": Module(names={"AutoAction": "openenv_core.compat.auto:AutoAction"}),
    "openenv.auto.auto_env": Module(names={"AutoEnv": "openenv_core.compat.auto:AutoEnv"}),
    "openenv.cli": Module(rest="the released package's own command line; `ropewalk --help` names ours"),
}

FORMER_ROOTS: Final = ("env_server", "client_types", "env_client", "http_env_client", "containers")
"""Which modules of `openenv.core` are found below `openenv_core` too; no module of ours has one of these names."""


def module_for(fullname: str) -> str | None:
    """Return the released module that an import asks for, None where it is none of ours to answer."""
    if fullname == RELEASED or fullname.startswith(f"{RELEASED}."):
        return fullname if fullname in MODULES else None
    root, _, below = fullname.partition(".")
    if root == FORMER and below.partition(".")[0] in FORMER_ROOTS:
        current = f"{RELEASED}.core.{below}"
        return current if current in MODULES else None
    return None
