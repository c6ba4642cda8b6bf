"""Programs that own containers, for tests that kill them and check whether the container is removed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve_process import eventually as eventually

from openenv_core.providers.docker import Container, DockerEngine
from openenv_core.providers.docker.sweeper import LABEL

WAIT_TIMEOUT_S = 60
REMOVAL_TIMEOUT_S = 60
"""Time limit for the removal of a container after its owner's death."""

OWNER = """
import json, os, sys, time
from openenv_core import LocalDockerProvider
from openenv_core.providers.docker import companion, DockerEngine

image, how, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
provider = LocalDockerProvider(image, **options)
provider.start()
helper = companion.ensure(DockerEngine.find().address)
print(json.dumps([provider.container.id, helper.pid]), flush=True)
if how == "fork":
    if os.fork() == 0:
        time.sleep(600)  # beyond REMOVAL_TIMEOUT_S
        os._exit(0)
if how == "a fork ends":
    if (pid := os.fork()) == 0:
        provider.stop()
        sys.exit(0)
    os.waitpid(pid, 0)
    print(provider.alive, flush=True)
if how == "raise":
    raise RuntimeError("on purpose")
if how == "end":
    sys.exit(0)
if how == "forget":
    del provider
    print("forgotten", flush=True)
time.sleep(100)
"""


def exists(engine: DockerEngine, container: str) -> bool:
    return any(each["Id"] == container for each in engine.list_labelled(LABEL))


def pids_of(container: Container) -> list[int]:
    """Return the pids, on the engine's machine, of a container's processes."""
    top = container.engine.call("GET", f"/containers/{container.id}/top")
    column = top["Titles"].index("PID")
    return [int(process[column]) for process in top["Processes"] or ()]


class Owning:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.container, self.companion = json.loads(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=WAIT_TIMEOUT_S)[1]
        return line


@contextmanager
def owner(image: str, how: str = "wait", host: str | None = None, **options: Any) -> Iterator[Owning]:
    """Start a program that owns a container on the engine at `host`."""
    environment = dict(os.environ) if host is None else {**os.environ, "DOCKER_HOST": host}
    command = [sys.executable, "-c", OWNER, image, how, json.dumps(options)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            yield Owning(process)
        finally:
            process.kill()
