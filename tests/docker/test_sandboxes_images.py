"""`ropewalk sandboxes` as a process of its own, over a real engine."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from owned_containers import PATIENCE_S, eventually
from slim_server import IMAGE, command

from openenv_core import ProviderError
from openenv_core.providers.docker import DockerEngine
from openenv_core.providers.remote import RemoteSandboxProvider, SandboxRefusedError

pytestmark = [pytest.mark.docker, pytest.mark.soak]

TOKEN = "correct-horse-battery-staple"


class Service:
    """A running service."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stdout is not None
        self.url = ""
        for line in process.stdout:
            self.lines.append(line)
            if "http://" in line:
                self.url = line.split()[-1]
                break
        assert self.url, self.lines
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def provider(self, **options: Any) -> RemoteSandboxProvider:
        options = {"image": IMAGE, "command": command("{port}"), "token": TOKEN, **options}
        return RemoteSandboxProvider(self.url, **options)

    def ended(self) -> int:
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += self.process.stdout


@contextmanager
def sandboxes(tmp_path: Path, *words: str, status: int = 0) -> Iterator[Service]:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN + "\n")
    words = ("--port", "0", "--token-file", str(tokens), *words)
    process = subprocess.Popen(
        [sys.executable, "-m", "openenv_core.cli", "sandboxes", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "ROPEWALK_TOKENS": "another-token-of-good-length"},
        start_new_session=True,
    )
    try:
        service = Service(process)
        yield service
        process.terminate()
        assert service.ended() == status, service.lines
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def of(engine: DockerEngine, service: Service) -> list[str]:
    """The containers that a service has made."""
    found = engine.list_labelled("ropewalk.owner")
    return [each["Id"] for each in found if f"-{service.process.pid}-" in each["Labels"]["ropewalk.owner"]]


def test_an_image_is_served_within_its_limits_and_removed(engine: DockerEngine, tmp_path: Path) -> None:
    with sandboxes(tmp_path, "--max-memory", "200m") as service:
        remote = service.provider(
            port=8123,
            env_vars={"GREETING": "aye"},
            memory="100m",
            cpus=0.5,
            pids=50,
            network="bridge",
            lease_s=20,
        )
        with remote:
            assert remote.url is not None
            with urlopen(remote.url + "/health", timeout=10) as answer:
                assert json.load(answer) == {"status": "healthy"}
            assert remote.output() == "slim says aye\n"
            (container,) = of(engine, service)
            host = engine.inspect(container)["HostConfig"]
            found = [host[name] for name in ("Memory", "NanoCpus", "PidsLimit", "ReadonlyRootfs", "CapDrop")]
            assert found == [100 << 20, 500_000_000, 50, True, ["ALL"]]
            environ = engine.inspect(container)["Config"]["Env"]
            assert not [line for line in environ if "token" in line.lower() or TOKEN in line]
        assert of(engine, service) == []
        # One that asks for no memory gets what the service allows, and nobody gets more.
        with service.provider():
            (container,) = of(engine, service)
            assert engine.inspect(container)["HostConfig"]["Memory"] == 200 << 20
        with pytest.raises(SandboxRefusedError, match="at most 209715200"):
            service.provider(memory="1g").start()
        with pytest.raises(SandboxRefusedError, match="memory"):
            service.provider(memory="2m").start()
        assert not any(TOKEN in line for line in service.lines)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_nothing_is_left_of_a_service_that_ends(engine: DockerEngine, tmp_path: Path, signum: int) -> None:
    status = -signal.SIGKILL if signum == signal.SIGKILL else 0
    with sandboxes(tmp_path, status=status) as service:
        running, starting = service.provider(lease_s=60), service.provider(command=["sleep", "60"])
        running.start()
        failures: list[BaseException] = []

        def start() -> None:
            try:
                starting.start()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=start)
        thread.start()
        eventually(lambda: len(of(engine, service)) == 2)
        service.process.send_signal(signum)
        service.ended()
        if signum == signal.SIGKILL:
            eventually(lambda: of(engine, service) == [])  # by the companion
        assert of(engine, service) == []
        thread.join(PATIENCE_S)
        assert [isinstance(error, ProviderError) for error in failures] == [True]
        running.stop()
