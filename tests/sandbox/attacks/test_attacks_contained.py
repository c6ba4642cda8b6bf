"""The catalogue inside a container with everything taken away that it can do without."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from docker_engine import engine, hostile_image
from interpreter_image import interpreter_image

__all__ = ["engine", "hostile_image", "interpreter_image"]

HERE = Path(__file__).resolve().parent
# What dockerfiles/code_interpreter/run takes away, too.
HARDENED = (
    *("--init", "--user", "10001:10001", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--read-only", "--tmpfs", "/tmp:rw,nosuid,nodev,noexec,size=256m,mode=1777"),
    *("--memory", "2g", "--memory-swap", "2g", "--pids-limit", "1024"),
)


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_attacks_in_a_hardened_container(interpreter_image: str) -> None:
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("needs the docker command line")
    catalogue = ["--volume", f"{HERE}:/catalogue/tests/sandbox/attacks:ro", "--workdir", "/catalogue"]
    program = ["-B", "-m", "tests.sandbox.attacks", "--level", "lsm", "--together", "4", "--json"]
    ran = subprocess.run(
        [
            docker,
            "run",
            "--rm",
            *HARDENED,
            *catalogue,
            "--entrypoint",
            "python3",
            interpreter_image,
            *program,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["isolation"], told["uid"]) == ("lsm", 10001)
    assert told["failures"] == []
    assert told["attacks"] >= 80
