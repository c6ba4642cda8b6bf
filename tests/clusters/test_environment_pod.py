"""The environment's server with the variables of its manifest, and its probe."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from free_ports import free_port
from manifests import ROOT, container, variables

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
    port = free_port()
    words = ["serve", "envs.blackjack_env.server.app:app", "--host", "0.0.0.0", "--port", str(port)]
    with subprocess.Popen(
        [sys.executable, "-m", "openenv_core.cli", *words], cwd=ROOT, env={**os.environ, **environment}
    ) as server:
        try:
            yield port
        finally:
            server.terminate()


def probe(port: int, token: Path) -> int:
    command = container("environment")["livenessProbe"]["exec"]["command"]
    assert command[0] == "python"
    code = command[-1].replace("/etc/ropewalk/token", str(token)).replace(":8000/", f":{port}/")
    done = subprocess.run(
        [sys.executable, *command[1:-1], code], capture_output=True, timeout=30, check=False
    )
    return done.returncode


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
    startup = container("environment")["startupProbe"]
    for _ in range(startup["failureThreshold"]):  # as the kubelet does, and as often
        if probe(port, token) == 0:
            break
        time.sleep(startup["periodSeconds"])
    else:
        pytest.fail("expected the probe to be let in, it never was")
    other = tmp_path / "token"
    other.write_text("another-token-0123456789")
    assert probe(port, other) != 0
    assert status(port) == 401
    # By the name that the run has for it, and by no other.
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    assert status(port, Host="environment-1.environment:8000", **allowed) == 200
    assert status(port, Host="elsewhere.example.org:8000", **allowed) in {400, 421}
