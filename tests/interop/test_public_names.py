"""The public methods of the released classes, and their parameters, against ours of the same names."""

import pytest
from released import drive

from openenv_core.compat.names import MODULES, RELEASED_VERSION
from servers.released import NAMES

pytestmark = pytest.mark.interop

LACKING = {
    # Ours may be `def` or `async def`; the server calls what an author defines.
    "openenv.core.env_server.interfaces:Environment": {
        "reset_async",
        "step_async",
        "render_web",
        "web_actions",
    },
    # Validators, which pydantic calls; nobody else does.
    "openenv.core.harness:TrainingTrace": {"unique_calls"},
    "openenv.core.harness:TrainingTurn": {"validate_capture"},
    "openenv.core.env_server.mcp_environment:MCPEnvironment": {"reset_async", "render_web", "web_actions"},
    # The server's own sessions: /metrics and `ropewalk top` count them.
    "openenv.core.env_server.http_server:HTTPEnvServer": {
        "active_sessions",
        "concurrency_config",
        "get_capacity_status",
        "get_session_info",
        "is_concurrency_safe",
        "max_concurrent_envs",
    },
    "openenv.core.env_server.web_interface:WebInterfaceManager": {
        "MAX_ACTION_LOGS",
        "connect_websocket",
        "disconnect_websocket",
    },
}
"""Members that ours do not have."""

OTHERWISE = {
    (
        "openenv.core.containers.runtime.daytona_provider:DaytonaProvider",
        "__init__",
    ),  # image and env_vars: at the start
    ("openenv.core.env_server.interfaces:Environment", "step"),  # timeout_s is the server's
    ("openenv.core.env_server.web_interface:WebInterfaceManager", "__init__"),  # made by the server only
    ("openenv.core.sync_client:SyncEnvClient", "__init__"),  # made by sync() only
    ("openenv:SyncEnvClient", "__init__"),
}
"""Methods that lack a parameter's name."""


def test_released_methods_and_their_parameters_are_ours_too() -> None:
    names = {
        module: sorted({*targets, *NAMES.get(module, ())})
        for module, targets in MODULES.items()
        if not module.startswith("openenv.core.rubrics")  # which differ on purpose
    }
    released = drive(RELEASED_VERSION, "class_members", plan=names)
    ours = drive(None, "class_members", "hook", plan=names)
    assert len(released) > 50
    lacking: dict[str, set[str]] = {}
    otherwise: set[tuple[str, str]] = set()
    for kind in released.keys() & ours.keys():
        for member, parameters in released[kind].items():
            if member not in ours[kind]:
                lacking.setdefault(kind, set()).add(member)
                continue
            collects = {"arguments", "options", "kwargs", "settings", "client_options", "data"} & {
                *ours[kind][member]
            }
            missing = {*parameters} - {*ours[kind][member]} - {"args", "kwargs", "provider_kwargs"}
            if missing and not collects:
                otherwise.add((kind, member))
    assert lacking == LACKING
    assert otherwise == OTHERWISE
