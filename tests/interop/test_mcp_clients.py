"""Current MCP clients with their default settings: every method."""

import json
import sys
from pathlib import Path

import pytest
from missing import missing
from module_run import finished
from released import DRIVERS, ROOT, WAIT_TIMEOUT_S, environment, our_server

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

FASTMCP = ROOT / ".venvs" / "fastmcp" / "bin" / "python"


@pytest.mark.parametrize("package", ["mcp", "fastmcp"])
def test_every_method_works_with_default_arguments(package: str) -> None:
    interpreter = Path(sys.executable) if package == "mcp" else FASTMCP
    if not interpreter.is_file():
        missing("needs fastmcp 4 in .venvs/fastmcp; get it with ./scripts/test --all")
    for name in ("shop", "sqlite"):
        with our_server(name) as url:
            command = [interpreter, DRIVERS / "mcp_defaults.py", package, f"{url}/mcp", name]
            done = finished(*command, env=environment(), timeout_s=WAIT_TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        results = json.loads(done.stdout.splitlines()[-1])
        assert results == {"tool": True, "called": True, "read": True, "prompted": True}
