"""The names that released environment folders import, and their counterparts here: data only.

A target is `module:attribute` of this package. Names that are not provided are listed too, so that the error of an
import can say what they belong to. `servers` provides the names of the server's side through `install`, since this
package must not import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

RELEASED: Final = "openenv"
"""The released package's import name."""

RELEASED_VERSION: Final = "0.10.0"
"""The release whose names these are: `openenv.__version__`."""

FORMER: Final = "openenv_core"
"""Its import name until 0.2, now that of our package: the same modules are found below it."""

_PROVIDERS = (
    "hosts of containers that have no adapter here; openenv_core.providers has LocalDockerProvider and "
    "RemoteSandboxProvider, and a client takes any object of their shape as provider"
)
_SERVER = (
    "a server's own classes: create_app builds the server, openenv_core.protocol reads and writes its frames"
)


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the released package.

    Attributes:
        names: The target of each name.
        unprovided: Names that are not provided, each with what it belongs to.
        includes: Modules whose names it has too.
        package: Whether it is a package.
        default_reason: What all other names belong to, if the rest of the module is not provided.
        replacement: Our module that replaces it, private names included, so that a patch of one takes effect in ours.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    unprovided: Mapping[str, str] = field(default_factory=dict)
    includes: tuple[str, ...] = ()
    package: bool = False
    default_reason: str | None = None
    replacement: str | None = None


def _names_in(module: str, names: str) -> dict[str, str]:
    """Return the targets of names that one of our modules has under the same names."""
    return {name: f"{module}:{name}" for name in names.split()}


def _not_provided(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


def _submodules(package: str, modules: str) -> tuple[str, ...]:
    return tuple(f"{package}.{module}" for module in modules.split())


MODULES: Final[Mapping[str, Module]] = {
    "openenv": Module(
        _names_in("openenv_core", "GenericAction GenericEnvClient SyncEnvClient"),
        includes=("openenv.auto",),
        package=True,
    ),
    "openenv.core": Module(
        includes=_submodules(
            "openenv.core", "env_server env_client generic_client sync_client mcp_client llm_client"
        ),
        package=True,
    ),
    "openenv.core.client_types": Module(_names_in("openenv_core", "StepResult")),
    "openenv.core.env_client": Module(_names_in("openenv_core", "EnvClient StepResult")),
    "openenv.core.generic_client": Module(_names_in("openenv_core", "GenericAction GenericEnvClient")),
    "openenv.core.sync_client": Module(_names_in("openenv_core", "SyncEnvClient")),
    "openenv.core.mcp_client": Module(
        dict.fromkeys(("MCPClientBase", "MCPToolClient"), "openenv_core.compat.mcp_client:MCPToolClient")
    ),
    "openenv.core.http_env_client": Module(
        unprovided=_not_provided(
            "release 0.1, whose clients and folders are not run here; `openenv init` of a later one makes them anew, "
            "and EnvClient(base_url, transport='http') talks to its servers",
            "HTTPEnvClient",
        )
    ),
    "openenv.core.env_server": Module(
        includes=_submodules(
            "openenv.core.env_server",
            "interfaces types http_server base_transforms exceptions mcp_types mcp_environment route_config "
            "serialization web_interface",
        ),
        package=True,
    ),
    "openenv.core.env_server.interfaces": Module(
        _names_in("openenv_core", "Action Environment EnvironmentMetadata Observation State")
        | _names_in("openenv_core.environment", "Transform")
        | _names_in("openenv_core.tasks", "TaskProvider")
        | _names_in("openenv_core.compat.types", "Message ModelTokenizer")
    ),
    "openenv.core.env_server.types": Module(
        _names_in("openenv_core", "Action ConcurrencyConfig EnvironmentMetadata Observation State")
        | _names_in(
            "openenv_core.compat.types",
            "BaseMessage CodeExecResult GetTaskRangeRequest GetTaskRequest HealthResponse HealthStatus "
            "ListTasksRequest NumTasksRequest ResetRequest ResetResponse SchemaResponse ServerMode StepRequest "
            "StepResponse WSCloseMessage WSErrorCode WSErrorResponse WSIncomingMessage WSObservationResponse "
            "WSResetMessage WSStateMessage WSStateResponse WSStepMessage",
        ),
        unprovided=_not_provided(_SERVER, "ServerCapacityStatus SessionInfo"),
    ),
    "openenv.core.env_server.http_server": Module(
        unprovided={
            **_not_provided(
                "the server's side: load the folder with `ropewalk serve`", "create_app create_fastapi_app"
            ),
            **_not_provided(_SERVER, "HTTPEnvServer"),
        }
    ),
    "openenv.core.env_server.base_transforms": Module(
        _names_in("openenv_core.environment", "CompositeTransform NullTransform")
    ),
    "openenv.core.env_server.exceptions": Module(
        {
            "ConcurrencyConfigurationError": "openenv_core:ConfigurationError",
            "OpenEnvError": "openenv_core:OpenEnvError",
        },
        unprovided=_not_provided(
            _SERVER, "EnvironmentFactoryError SessionCapacityError SessionCreationError SessionNotFoundError"
        ),
    ),
    "openenv.core.env_server.mcp_types": Module(
        _names_in(
            "openenv_core.tools",
            "CallToolAction CallToolObservation ListToolsAction ListToolsObservation RESERVED_TOOL_NAMES Tool "
            "ToolError ToolErrorType",
        )
        | _names_in(
            "openenv_core.compat.types",
            "JsonRpcError JsonRpcErrorCode JsonRpcRequest JsonRpcResponse McpMethod WSMCPMessage WSMCPResponse",
        )
    ),
    "openenv.core.env_server.mcp_environment": Module(
        _names_in(
            "openenv_core.tools.mcp_environment", "MCPEnvironment MCP_TOOL_CALL_TIMEOUT get_server_tools"
        )
    ),
    "openenv.core.env_server.route_config": Module(unprovided=_not_provided(_SERVER, "GetEndpointConfig")),
    "openenv.core.env_server.serialization": Module(
        _names_in(
            "openenv_core.compat.types",
            "deserialize_action deserialize_action_with_preprocessing serialize_observation",
        )
    ),
    "openenv.core.env_server.web_interface": Module(
        _names_in("openenv_core.compat.types", "load_environment_metadata"),
        unprovided=_not_provided(
            "the server's side: load the folder with `ropewalk serve`",
            "WebInterfaceManager create_web_interface_app",
        ),
    ),
    "openenv.core.containers": Module(default_reason=_PROVIDERS, package=True),
    "openenv.core.containers.runtime": Module(
        unprovided=_not_provided(_PROVIDERS, "UVProvider"),
        includes=("openenv.core.containers.runtime.providers",),
        default_reason=_PROVIDERS,
        package=True,
    ),
    "openenv.core.containers.runtime.providers": Module(
        _names_in(
            "openenv_core.compat.containers",
            "ContainerProvider KubernetesProvider LocalDockerProvider RuntimeProvider",
        ),
        default_reason=_PROVIDERS,
    ),
    "openenv.core.containers.runtime.daytona_provider": Module(
        _names_in("openenv_core.compat.daytona", "DaytonaProvider"), replacement="openenv_core.compat.daytona"
    ),
    "openenv.core.rubrics": Module(
        includes=_submodules("openenv.core.rubrics", "base containers trajectory llm_judge"), package=True
    ),
    "openenv.core.rubrics.base": Module(_names_in("openenv_core.rubrics", "Rubric")),
    "openenv.core.rubrics.containers": Module(
        _names_in("openenv_core.rubrics", "Gate RubricDict RubricList Sequential WeightedSum")
    ),
    "openenv.core.rubrics.llm_judge": Module(_names_in("openenv_core.compat.judge", "LLMJudge")),
    "openenv.core.rubrics.trajectory": Module(
        _names_in("openenv_core.rubrics", "ExponentialDiscountingTrajectoryRubric TrajectoryRubric")
    ),
    "openenv.core.llm_client": Module(
        _names_in(
            "openenv_core.llm_client",
            "AnthropicClient LLMClient LLMResponse OpenAIClient ToolCall create_llm_client",
        ),
        replacement="openenv_core.llm_client",
    ),
    "openenv.core.tools": Module(
        includes=_submodules("openenv.core.tools", "git_server_client local_python_executor"), package=True
    ),
    "openenv.core.tools.git_server_client": Module(
        _names_in("openenv_core.compat.git_server", "GitServerClient RepoInfo")
    ),
    "openenv.core.tools.local_python_executor": Module(
        _names_in("openenv_core.compat.executor", "PyExecutor")
    ),
    "openenv.core.utils": Module(
        _names_in("openenv_core.loop_thread", "run_async_safely")
        | {"convert_to_ws_url": "openenv_core.protocol.http:websocket_url"}
    ),
    "openenv.core.harness": Module(
        _names_in(
            "openenv_core.compat.harness",
            "Message ResourceSession ResourceSessionFactory ToolResult VerifyResult",
        )
        | _names_in(
            "openenv_core.compat.harness_rollouts",
            "HarnessAdapter HarnessRolloutResult HarnessRunLimits LoopOwningSession MCPHarnessAdapter ModelStep "
            "ModelStepResult RolloutEvent ToolTraceEntry TraceEntry TrainableSession TrainingTrace TrainingTurn",
        )
        | _names_in(
            "openenv_core.compat.harness_sessions",
            "CLIHarnessAdapter SessionMCPBridge StepEnvSessionAdapter build_harness_rollout_func",
        )
        | _names_in("openenv_core.tools", "RESERVED_TOOL_NAMES"),
        default_reason="drivers of coding agents",
        package=True,
    ),
    "openenv.core.harness.collect": Module(
        _names_in(
            "openenv_core.compat.harness_collect",
            "CollectResult CollectRunner EpisodeRecord METADATA_FILENAME README_FILENAME RESULTS_FILENAME "
            "RolloutSerializer build_dataset_readme build_model_step push_to_hf_hub",
        )
    ),
    "openenv.core.harness.capture": Module(default_reason="capture of agents' calls", package=True),
    "openenv.core.harness.capture.upstream": Module(
        _names_in("openenv_core.compat.harness_rollouts", "training_sampling"),
        default_reason="capture of agents' calls",
    ),
    "openenv.core.evals": Module(
        includes=_submodules("openenv.core.evals", "base types inspect_harness"), package=True
    ),
    "openenv.core.evals.base": Module(_names_in("openenv_core.compat.evals", "EvalHarness")),
    "openenv.core.evals.types": Module(_names_in("openenv_core.compat.evals", "EvalConfig EvalResult")),
    "openenv.core.evals.inspect_harness": Module(_names_in("openenv_core.compat.evals", "InspectAIHarness")),
    "openenv.auto": Module(
        includes=("openenv.auto.auto_action", "openenv.auto.auto_env"),
        default_reason="the released package's own ways of finding environments; openenv_core.make takes a name",
        package=True,
    ),
    "openenv.auto.auto_action": Module(_names_in("openenv_core.compat.auto", "AutoAction")),
    "openenv.auto.auto_env": Module(_names_in("openenv_core.compat.auto", "AutoEnv")),
    "openenv.cli": Module(
        default_reason="the released package's own command line; `ropewalk --help` names ours"
    ),
}

FORMER_ROOTS: Final = ("env_server", "client_types", "env_client", "http_env_client", "containers")
"""Modules of `openenv.core` that are found below `openenv_core` too; none of our modules has one of these names."""


def module_for(fullname: str) -> str | None:
    """Return the released module of an import's name; None if the table has no such module."""
    if fullname == RELEASED or fullname.startswith(f"{RELEASED}."):
        return fullname if fullname in MODULES else None
    root, _, submodule = fullname.partition(".")
    if root == FORMER and submodule.partition(".")[0] in FORMER_ROOTS:
        current = f"{RELEASED}.core.{submodule}"
        return current if current in MODULES else None
    return None
