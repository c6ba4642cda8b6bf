import subprocess
import sys

import openenv_core

HEAVY = (
    "fastapi",
    "starlette",
    "uvicorn",
    "torch",
    "gymnasium",
    "numpy",
    "httpx",
    "servers",
    "vllm",
    "monarch",
)


def modules_of(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(output.split())


def loaded_by(statement: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_of(statement)}


def test_the_package_is_light() -> None:
    loaded = loaded_by("import openenv_core")
    assert not loaded & {*HEAVY, "picows"}


def test_so_are_the_client_and_the_provider() -> None:
    loaded = loaded_by("from openenv_core import EnvClient, GenericEnvClient, LocalProcessProvider")
    assert "picows" in loaded
    assert not loaded & set(HEAVY)


def test_tools_cost_those_who_call_them() -> None:
    assert "openenv_core.tools" not in modules_of("from openenv_core import EnvClient, GenericEnvClient")
    callers = modules_of("from openenv_core import MCPToolClient; import openenv_core.compat.mcp_environment")
    assert "openenv_core.tools" in callers
    assert not {name.partition(".")[0] for name in callers} & {*HEAVY, "mcp", "fastmcp"}


def test_every_name_that_is_promised_is_there() -> None:
    for name in openenv_core.__all__:
        assert getattr(openenv_core, name) is not None
    assert sorted(openenv_core.__all__) == openenv_core.__all__
    assert not hasattr(openenv_core, "no_such_name")
