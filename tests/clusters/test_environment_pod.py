"""The environment's server with the variables of its manifest, and its probe."""

import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from manifests import container, variables
from module_run import finished
from serve_process import serve

pytestmark = [pytest.mark.soak, pytest.mark.timeout(120)]

TOKEN = "of-the-environment-0123456789"


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "token"
    file.write_text(TOKEN)
    return file


@pytest.fixture(scope="module")
def port(token: Path) -> Iterator[int]:
    environment = {name: value for name, value in variables("environment").items() if value is not None}
    # The image lets everybody in by itself; the manifest's token must win.
    environment |= {"ROPEWALK_TOKEN_FILE": str(token), "ROPEWALK_INSECURE": "1"}
    with serve("--host", "0.0.0.0", app="envs.blackjack_env.server.app:app", **environment) as server:
        yield server.port


def probe(port: int, token: Path) -> int:
    command = container("environment")["livenessProbe"]["exec"]["command"]
    assert command[0] == "python"
    code = command[-1].replace("/etc/ropewalk/token", str(token)).replace(":8000/", f":{port}/")
    return finished(sys.executable, *command[1:-1], code, timeout_s=30).returncode


def status(port: int, **headers: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_probe_and_the_run_are_let_in_and_nobody_without_the_token(
    port: int, token: Path, tmp_path: Path
) -> None:
    assert probe(port, token) == 0
    other = tmp_path / "token"
    other.write_text("another-token-0123456789")
    assert probe(port, other) != 0
    assert status(port) == 401
    # By the name that the run has for it, and by no other.
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    assert status(port, Host="environment-1.environment:8000", **allowed) == 200
    assert status(port, Host="elsewhere.example.org:8000", **allowed) in {400, 421}
