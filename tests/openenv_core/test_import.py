"""What imports load: the core is light; heavy libraries are loaded only by those who use them."""

import importlib
import subprocess
import sys

import pytest

import openenv_core
import openenv_core.errors
import openenv_core.providers
from openenv_core.errors import ConfigurationError, installed_with

HEAVY = {
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
}
CLIENT = {"picows", "websockets", "openenv_core.client", "openenv_core.sandbox", "openenv_core.tools"}


@pytest.mark.parametrize(
    ("statement", "loaded", "spared"),
    [
        ("import openenv_core; openenv_core.is_infrastructure_failure({})", set(), CLIENT),
        (
            "from openenv_core import EnvClient, GenericEnvClient, LocalProcessProvider",
            {"openenv_core.client.env_client"},
            {"openenv_core.tools", "picows", "pydantic.plugin._loader", "importlib.metadata", "email"},
        ),
        (
            "from openenv_core import MCPToolClient; import openenv_core.tools.mcp_environment",
            {"openenv_core.tools"},
            {"mcp", "fastmcp"},
        ),
        (
            "from openenv_core import compat; compat.install()\n"
            "import openenv.core.env_server.http_server, openenv.core.env_client",
            set(),
            {"picows", "websockets"},
        ),
        ("import servers.cli.serve", set(), {"fastapi", "starlette", "uvicorn"}),
    ],
)
def test_import_loads_no_more_than_it_needs(statement: str, loaded: set[str], spared: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    light = (
        {"servers"} if "servers" in statement or "compat" in statement else set()
    )  # it has names for the hook
    assert loaded <= modules
    assert not modules & (HEAVY - light | spared)


def test_every_public_name_exists() -> None:
    for name in openenv_core.__all__:
        assert getattr(openenv_core, name) is not None
    assert sorted(openenv_core.__all__) == openenv_core.__all__
    # Those as well that are not imported yet, and nothing else.
    assert {name for name in dir(openenv_core) if not name.startswith("_")} == set(openenv_core.__all__)
    assert openenv_core.__version__[0].isdigit()
    assert not hasattr(openenv_core, "no_such_name")
    assert not hasattr(openenv_core.providers, "Nobody")


def test_missing_package_is_reported_with_its_extra() -> None:
    expected_error = pytest.raises(
        ConfigurationError, match=r"expected a spoon, got: .*no_such.*ropewalk\[author\]"
    )
    with expected_error, installed_with("author", "a spoon", "no_such_package"):
        importlib.import_module("no_such_package")
    with pytest.raises(ModuleNotFoundError), installed_with("author", "a spoon", "another"):
        importlib.import_module("no_such_package")
