"""A container lives as long as its owner wants it, and no longer, whatever the owner dies of."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from owned_containers import GONE_S, PATIENCE_S, eventually, exists, owner

from openenv_core import ProviderError, ServerStartFailed
from openenv_core.providers.docker import (
    ContainerOptions,
    Engine,
    LocalDockerProvider,
    companion,
    start_container,
)
from openenv_core.providers.health import status_of

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]  # the first waits for the image


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_killed_owner_leaves_no_container(engine: Engine, hostile_image: str, signum: int) -> None:
    with owner(hostile_image) as owning:
        assert exists(engine, owning.container)
        owning.process.send_signal(signum)
        owning.process.wait(PATIENCE_S)
        eventually(lambda: not exists(engine, owning.container), GONE_S)
        eventually(lambda: not psutil.pid_exists(owning.companion))


HALFWAY = """
import sys, time
from openenv_core.providers.docker import starting
def created(engine, container, options):
    print(container.id, flush=True)
    time.sleep(100)
starting._run = created
starting.start_container(sys.argv[1])
"""


@pytest.mark.soak
def test_an_owner_killed_between_create_and_start_leaves_no_container(
    engine: Engine, hostile_image: str
) -> None:
    command = [sys.executable, "-c", HALFWAY, hostile_image]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        container = process.stdout.readline().strip()
        assert exists(engine, container)
        process.kill()
    eventually(lambda: not exists(engine, container), GONE_S)


@pytest.mark.soak
def test_ctrl_c_of_a_terminal_leaves_no_container(engine: Engine, hostile_image: str) -> None:
    with owner(hostile_image) as owning:
        os.killpg(owning.process.pid, signal.SIGINT)  # as a terminal does it: the whole group
        assert owning.process.wait(PATIENCE_S) != 0
        eventually(lambda: not exists(engine, owning.container), GONE_S)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["raise", "end"])
def test_an_owner_that_forgets_leaves_nothing(engine: Engine, hostile_image: str, how: str) -> None:
    with owner(hostile_image, how) as owning:
        owning.process.wait(PATIENCE_S)
        assert not exists(engine, owning.container)  # the owner's exit waits for the container's end
        eventually(lambda: not psutil.pid_exists(owning.companion))


@pytest.mark.soak
def test_a_provider_that_nobody_has_any_more_is_none(engine: Engine, hostile_image: str) -> None:
    with owner(hostile_image, "forget") as owning:
        assert owning.line().strip() == "forgotten"
        assert not exists(engine, owning.container)


@pytest.mark.soak
def test_a_fork_that_outlives_the_owner_does_not_keep_the_container(
    engine: Engine, hostile_image: str
) -> None:
    with owner(hostile_image, "fork") as owning:
        eventually(lambda: len(psutil.Process(owning.process.pid).children()) == 2)
        [fork] = [
            each for each in psutil.Process(owning.process.pid).children() if each.pid != owning.companion
        ]
        try:
            owning.process.kill()
            owning.process.wait(PATIENCE_S)
            eventually(lambda: not exists(engine, owning.container), GONE_S)
            assert fork.is_running()
        finally:
            fork.kill()


@pytest.mark.soak
def test_a_fork_that_ends_does_not_end_the_container(engine: Engine, hostile_image: str) -> None:
    with owner(hostile_image, "a fork ends") as owning:
        assert owning.line().strip() == "True"
        assert exists(engine, owning.container)


@pytest.mark.soak
def test_a_killed_companion_is_replaced(engine: Engine, hostile_image: str) -> None:
    with owner(hostile_image) as owning:
        os.kill(owning.companion, signal.SIGKILL)
        family = psutil.Process(owning.process.pid)
        eventually(lambda: any(each.pid != owning.companion for each in family.children()))
        owning.process.kill()
        owning.process.wait(PATIENCE_S)
        eventually(lambda: not exists(engine, owning.container), GONE_S)


@pytest.mark.soak
def test_what_owner_and_companion_left_is_swept_at_the_next_start(engine: Engine, hostile_image: str) -> None:
    with owner(hostile_image) as living, owner(hostile_image) as owning:
        # The companion first, while its owner cannot replace it.
        owning.process.send_signal(signal.SIGSTOP)
        os.kill(owning.companion, signal.SIGKILL)
        owning.process.kill()
        owning.process.wait(PATIENCE_S)
        time.sleep(1)
        assert exists(engine, owning.container)  # nobody has seen it yet
        with owner(hostile_image) as third:
            eventually(lambda: not exists(engine, owning.container), GONE_S)
            # Those who live are let alone.
            assert exists(engine, living.container)
            assert exists(engine, third.container)


def test_a_server_that_dies_at_its_start_shows_its_log(hostile_image: str) -> None:
    with pytest.raises(ServerStartFailed, match=r"ended with exit code 3; the output tells why") as raised:
        start_container(hostile_image, ContainerOptions(env_vars={"HOSTILE_START": "die"}))
    assert raised.value.output == "dying on purpose\n"


@pytest.mark.soak
def test_a_server_killed_for_its_memory_at_its_start_says_so(hostile_image: str) -> None:
    options = ContainerOptions(env_vars={"HOSTILE_START": "memory"}, memory="64m")
    # Engines lose the kernel's notice where a container ends quickly; then it is said as what it may be.
    told = r"exit code 137(, killed for its memory; raise memory|; something killed it: raise memory if)"
    with pytest.raises(ServerStartFailed, match=told):
        start_container(hostile_image, options)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["silent", "drip"])
def test_a_server_that_is_never_healthy_is_given_up(engine: Engine, hostile_image: str, how: str) -> None:
    options = ContainerOptions(
        env_vars={"HOSTILE_START": how}, start_timeout_s=2, labels={"ropewalk-test": how}
    )
    with pytest.raises(ServerStartFailed, match="healthy on port 8000 within 2 s"):
        start_container(hostile_image, options)
    assert engine.labelled(f"ropewalk-test={how}") == []


@pytest.mark.soak
def test_a_server_that_dies_later_is_known_to_have(hostile_image: str) -> None:
    with LocalDockerProvider(hostile_image) as provider:
        assert provider.alive
        assert provider.container is not None
        assert len(provider.container.pids()) >= 2  # init and the server
        stats = provider.container.stats()
        assert stats.memory_bytes > 10 * 2**20
        assert stats.cpu_s > 0
        assert stats.pids >= 2
        os.kill(provider.container.pids()[0], signal.SIGKILL)
        eventually(lambda: not provider.alive)
        assert "[the container ended with exit code 137]" in provider.output()


def test_start_and_stop_as_often_as_one_likes(engine: Engine, hostile_image: str) -> None:
    provider = LocalDockerProvider(hostile_image)
    assert (provider.url, provider.alive, provider.output()) == (None, False, "")
    url = provider.start()
    assert provider.start() == url == provider.url
    first = provider.container
    assert first is not None
    provider.stop()
    provider.stop()
    assert not exists(engine, first.id)
    assert not first.alive()
    provider.start()
    assert provider.container is not None
    assert provider.container.id != first.id
    provider.stop()


@pytest.mark.soak
def test_a_start_under_way_ends_when_it_is_stopped(engine: Engine, hostile_image: str) -> None:
    labels = {"ropewalk-test": "stopped"}
    provider = LocalDockerProvider(hostile_image, env_vars={"HOSTILE_START": "silent"}, labels=labels)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            provider.start()
        except ProviderError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    eventually(lambda: engine.labelled("ropewalk-test=stopped"))
    provider.stop()
    thread.join(PATIENCE_S)
    assert "it was stopped meanwhile" in str(errors[0])
    assert engine.labelled("ropewalk-test=stopped") == []


def test_published_on_the_loopback_interface_alone(hostile_image: str) -> None:
    with LocalDockerProvider(hostile_image) as provider:
        assert provider.url is not None
        port = int(provider.url.rpartition(":")[2])
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", provider.url)
        assert status_of(port, 5) == "healthy"
        listening = {
            each.laddr.ip
            for each in psutil.net_connections("inet")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port
        }
        assert listening <= {"127.0.0.1"}


@pytest.mark.soak
def test_one_companion_for_all_containers_of_a_process(engine: Engine, hostile_image: str) -> None:
    with LocalDockerProvider(hostile_image), LocalDockerProvider(hostile_image):
        ours = companion.ensure(engine.address)
        mine = {str(companion.SCRIPT), engine.address.url}
        found = [each.pid for each in psutil.Process().children() if mine <= set(each.cmdline())]
        assert found == [ours.pid]
