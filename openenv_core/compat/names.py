"""The names that released environment folders import, and their counterparts here: data only.

Names that are not provided are listed too, so that the error of an
import can say what they belong to. `servers` provides the names of the server's side through `install`, since this
package must not import it.
"""

from collections.abc import Iterator, Mapping
from typing import Final

RELEASED: Final = "openenv"
"""The released package's import name."""

RELEASED_VERSION: Final = "0.10.0"
"""The release whose names these are: `openenv.__version__`."""

FORMER: Final = "openenv_core"
"""Its import name until 0.2, now that of our package: the same modules are found below it."""

NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "openenv": {"openenv_core": "GenericAction GenericEnvClient SyncEnvClient"},
    "openenv.core.client_types": {"openenv_core": "StepResult"},
    "openenv.core.env_client": {"openenv_core": "EnvClient StepResult"},
    "openenv.core.generic_client": {"openenv_core": "GenericAction GenericEnvClient"},
    "openenv.core.sync_client": {"openenv_core": "SyncEnvClient"},
    "openenv.core.mcp_client": {"openenv_core.compat.mcp_client": "MCPClientBase MCPToolClient"},
    "openenv.core.env_server.interfaces": {
        "openenv_core": "Action Environment EnvironmentMetadata Observation State",
        "openenv_core.environment": "Transform",
        "openenv_core.tasks": "TaskProvider",
        "openenv_core.compat.types": "Message ModelTokenizer",
    },
    "openenv.core.env_server.types": {
        "openenv_core": "Action ConcurrencyConfig EnvironmentMetadata Observation State",
        "openenv_core.compat.types": """
            BaseMessage CodeExecResult GetTaskRangeRequest GetTaskRequest HealthResponse HealthStatus
            ListTasksRequest NumTasksRequest ResetRequest ResetResponse SchemaResponse ServerMode StepRequest
            StepResponse WSCloseMessage WSErrorCode WSErrorResponse WSIncomingMessage WSObservationResponse
            WSResetMessage WSStateMessage WSStateResponse WSStepMessage
        """,
    },
    "openenv.core.env_server.base_transforms": {
        "openenv_core.environment": "CompositeTransform NullTransform"
    },
    "openenv.core.env_server.exceptions": {
        "openenv_core": "ConcurrencyConfigurationError=ConfigurationError OpenEnvError"
    },
    "openenv.core.env_server.mcp_types": {
        "openenv_core.tools": """
            CallToolAction CallToolObservation ListToolsAction ListToolsObservation RESERVED_TOOL_NAMES Tool
            ToolError ToolErrorType
        """,
        "openenv_core.compat.types": """
            JsonRpcError JsonRpcErrorCode JsonRpcRequest JsonRpcResponse McpMethod WSMCPMessage WSMCPResponse
        """,
    },
    "openenv.core.env_server.mcp_environment": {
        "openenv_core.tools.mcp_environment": "MCPEnvironment MCP_TOOL_CALL_TIMEOUT get_server_tools"
    },
    "openenv.core.env_server.serialization": {
        "openenv_core.compat.types": """
            deserialize_action deserialize_action_with_preprocessing serialize_observation
        """
    },
    "openenv.core.env_server.web_interface": {"openenv_core.compat.types": "load_environment_metadata"},
    "openenv.core.containers.runtime.providers": {
        "openenv_core.compat.containers": """
            ContainerProvider KubernetesProvider LocalDockerProvider RuntimeProvider
        """
    },
    "openenv.core.containers.runtime.daytona_provider": {"openenv_core.compat.daytona": "DaytonaProvider"},
    "openenv.core.rubrics.base": {"openenv_core.rubrics": "Rubric"},
    "openenv.core.rubrics.containers": {
        "openenv_core.rubrics": "Gate RubricDict RubricList Sequential WeightedSum"
    },
    "openenv.core.rubrics.llm_judge": {"openenv_core.compat.judge": "LLMJudge"},
    "openenv.core.rubrics.trajectory": {
        "openenv_core.rubrics": "ExponentialDiscountingTrajectoryRubric TrajectoryRubric"
    },
    "openenv.core.llm_client": {
        "openenv_core.llm_client": """
            AnthropicClient LLMClient LLMResponse OpenAIClient ToolCall create_llm_client
        """
    },
    "openenv.core.tools.git_server_client": {"openenv_core.compat.git_server": "GitServerClient RepoInfo"},
    "openenv.core.tools.local_python_executor": {"openenv_core.compat.executor": "PyExecutor"},
    "openenv.core.utils": {
        "openenv_core.loop_thread": "run_async_safely",
        "openenv_core.protocol.http": "convert_to_ws_url=websocket_url",
    },
    "openenv.core.harness": {
        "openenv_core.compat.harness": "Message ResourceSession ResourceSessionFactory ToolResult VerifyResult",
        "openenv_core.compat.harness_rollouts": """
            HarnessAdapter HarnessRolloutResult HarnessRunLimits LoopOwningSession MCPHarnessAdapter ModelStep
            ModelStepResult RolloutEvent ToolTraceEntry TraceEntry TrainableSession TrainingTrace TrainingTurn
        """,
        "openenv_core.compat.harness_sessions": """
            CLIHarnessAdapter SessionMCPBridge StepEnvSessionAdapter build_harness_rollout_func
        """,
        "openenv_core.tools": "RESERVED_TOOL_NAMES",
    },
    "openenv.core.harness.collect": {
        "openenv_core.compat.harness_collect": """
            CollectResult CollectRunner EpisodeRecord METADATA_FILENAME README_FILENAME RESULTS_FILENAME
            RolloutSerializer build_dataset_readme build_model_step push_to_hf_hub
        """
    },
    "openenv.core.harness.capture.upstream": {"openenv_core.compat.harness_rollouts": "training_sampling"},
    "openenv.core.evals.base": {"openenv_core.compat.evals": "EvalHarness"},
    "openenv.core.evals.types": {"openenv_core.compat.evals": "EvalConfig EvalResult"},
    "openenv.core.evals.inspect_harness": {"openenv_core.compat.evals": "InspectAIHarness"},
    "openenv.auto.auto_action": {"openenv_core.compat.auto": "AutoAction"},
    "openenv.auto.auto_env": {"openenv_core.compat.auto": "AutoEnv"},
}
"""By released module: our modules, and the names that both have; `theirs=ours` where a name differs."""

INCLUDES: Final[Mapping[str, str]] = {
    "openenv": "auto",
    "openenv.core": "env_server env_client generic_client sync_client mcp_client llm_client",
    "openenv.core.env_server": """
        interfaces types http_server base_transforms exceptions mcp_types mcp_environment route_config serialization
        web_interface
    """,
    "openenv.core.containers.runtime": "providers",
    "openenv.core.rubrics": "base containers trajectory llm_judge",
    "openenv.core.tools": "git_server_client local_python_executor",
    "openenv.core.evals": "base types inspect_harness",
    "openenv.auto": "auto_action auto_env",
}
"""By package: those of its modules whose names it has too."""

_OLD_CLIENT: Final = (
    "release 0.1, whose clients and folders are not run here; `openenv init` of a later one makes them anew, "
    "and EnvClient(base_url, transport='http') talks to its servers"
)
_APP: Final = "the server's side: load the folder with `ropewalk serve`"
_SERVER: Final = (
    "a server's own classes: create_app builds the server, openenv_core.protocol reads and writes its frames"
)
_PROVIDERS: Final = (
    "hosts of containers that have no adapter here; openenv_core.providers has LocalDockerProvider and "
    "RemoteSandboxProvider, and a client takes any object of their shape as provider"
)

_UNPROVIDED: Final = (
    ("openenv.core.env_server.types", _SERVER, "ServerCapacityStatus SessionInfo"),
    ("openenv.core.env_server.http_server", _APP, "create_app create_fastapi_app"),
    ("openenv.core.env_server.http_server", _SERVER, "HTTPEnvServer"),
    ("openenv.core.env_server.exceptions", _SERVER, "EnvironmentFactoryError SessionCapacityError"),
    ("openenv.core.env_server.exceptions", _SERVER, "SessionCreationError SessionNotFoundError"),
    ("openenv.core.env_server.route_config", _SERVER, "GetEndpointConfig"),
    ("openenv.core.env_server.web_interface", _APP, "WebInterfaceManager create_web_interface_app"),
)

UNPROVIDED: Final[Mapping[tuple[str, str], str]] = {
    (module, name): reason for module, reason, names in _UNPROVIDED for name in names.split()
}
"""What names that are not provided belong to, by module and name."""

REASONS: Final[Mapping[str, str]] = {
    "openenv.core.containers": _PROVIDERS,
    "openenv.core.containers.runtime": _PROVIDERS,
    "openenv.core.containers.runtime.providers": _PROVIDERS,
    "openenv.core.http_env_client": _OLD_CLIENT,
    "openenv.core.harness": "drivers of coding agents",
    "openenv.core.harness.capture": "capture of agents' calls",
    "openenv.core.harness.capture.upstream": "capture of agents' calls",
    "openenv.auto": "the released package's own ways of finding environments; openenv_core.make takes a name",
    "openenv.cli": "the released package's own command line; `ropewalk --help` names ours",
}
"""What all other names of a module belong to, if the rest of it is not provided."""

REPLACED: Final = frozenset({"openenv.core.containers.runtime.daytona_provider", "openenv.core.llm_client"})
"""Modules that ours replace, private names included, so that a patch of one takes effect in ours."""


def _targets(module: str) -> dict[str, str]:
    pairs = [(ours, name) for ours, names in NAMES.get(module, {}).items() for name in names.split()]
    return {name.partition("=")[0]: f"{ours}:{name.rpartition('=')[2]}" for ours, name in pairs}


MODULES: Final[Mapping[str, Mapping[str, str]]] = {
    module: _targets(module)
    for module in sorted({*NAMES, *INCLUDES, *REASONS, *(module for module, _ in UNPROVIDED)})
}
"""The released modules: the target of each name, as `module:attribute` of this package."""


def with_included(module: str) -> Iterator[str]:
    """Yield a module, and those whose names it has too."""
    yield module
    for name in INCLUDES.get(module, "").split():
        yield from with_included(f"{module}.{name}")


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
