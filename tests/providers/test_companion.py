"""The companion of a program's containers at the end of the program: it waits for these."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fake_engine import fake_engine
from serve_process import eventually, gone

WAIT_TIMEOUT_S = 60

BEGIN = """
import os, signal, sys, threading, time
from openenv_core import LocalDockerProvider, ProviderError
from openenv_core.providers.docker import DockerEngine, companion, start_container
companion.EXIT_TIMEOUT_S = 3600.0  # a wait for nothing would be seen
"""

NO_ENGINE = """
try: LocalDockerProvider("x").start()
except ProviderError as error: print(type(error).__name__)
print(companion.ensure(DockerEngine.find().address).pid)
"""

STARTING = """
threading.Thread(target=start_container, args=("x",), daemon=True).start()
sys.stdin.read(1)
"""

ENDED = """
import atexit
def late():
    try: start_container("x")
    except ProviderError as error: print(error)
companion.ensure(DockerEngine.find().address)
companion._close_all()
late()
"""

WITHOUT_COMPANION = """
ours = companion.ensure(DockerEngine.find().address)
with ours.guard_creation("left"):
    DockerEngine.find().call("POST", "/containers/create", query={"name": "left"}, body={"Labels": ours.labels})
os.kill(ours.pid, signal.SIGKILL)
while ours._process.poll() is None: time.sleep(0.01)
"""

MAKE = """
ours = companion.ensure(DockerEngine.find().address)
with ours.guard_creation(NAME):
    DockerEngine.find().call("POST", "/containers/create", query={"name": NAME}, body={"Labels": ours.labels})
print(ours.pid, flush=True)
"""

BECOMES_ANOTHER = """
NAME = "first"
{make}
os.execv(sys.executable, [sys.executable, "-c", {then!r}])
"""


def program(code: str, host: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + code],
        env={**os.environ, "DOCKER_HOST": host},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_program_without_engine_or_containers_ends_at_once() -> None:
    nowhere = "unix:///nowhere/docker.sock"
    with program(NO_ENGINE, nowhere) as process:
        out, err = process.communicate(timeout=WAIT_TIMEOUT_S)
        assert (out.split()[:1], err) == (["EngineUnavailableError"], "")
        eventually(lambda: gone(int(out.split()[1])))


@pytest.mark.slow
def test_container_being_created_at_the_program_end_is_removed(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine:
        engine.may_create.clear()
        with program(STARTING, engine.host) as process:
            assert engine.request_received.wait(WAIT_TIMEOUT_S)
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)  # it is at its end, and should not come to it
            engine.may_create.set()
            process.wait(WAIT_TIMEOUT_S)
            eventually(lambda: len(engine.removed) == 1)


def test_no_container_is_started_while_the_program_ends(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine, program(ENDED, engine.host) as process:
        out, err = process.communicate(timeout=WAIT_TIMEOUT_S)
        assert "expected a program that goes on, got one that is ending" in out, err
        assert not engine.request_received.is_set()


def test_companion_that_died_before_the_end_is_replaced(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine, program(WITHOUT_COMPANION, engine.host) as process:
        _, err = process.communicate(timeout=WAIT_TIMEOUT_S)
        assert process.returncode == 0, err
        assert engine.removed == ["left"]


@pytest.mark.soak
def test_exec_removes_only_the_containers_of_the_first_program(tmp_path: Path) -> None:
    then = BEGIN + 'NAME = "second"\n' + MAKE + "sys.stdin.read(1)"
    with (
        fake_engine(tmp_path) as engine,
        program(BECOMES_ANOTHER.format(make=MAKE, then=then), engine.host) as process,
    ):
        first = int(process.stdout.readline())
        assert process.stdout.readline()
        eventually(lambda: engine.removed == ["first"])
        eventually(lambda: gone(first))
        assert list(engine.containers) == ["second"]
        process.communicate("x", timeout=WAIT_TIMEOUT_S)
        assert engine.removed == ["first", "second"]
