"""Real containers: their lifetime, their limits, and clients that start them."""

import asyncio
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from compat_hook import uninstall_hook
from free_ports import free_port
from owned_containers import REMOVAL_TIMEOUT_S, WAIT_TIMEOUT_S, eventually, exists, owner, pids_of

from openenv_core import (
    ConfigurationError,
    ConnectionLostError,
    EngineRefusedError,
    GenericEnvClient,
    OptionUnavailableError,
    ProviderError,
    ServerStartError,
    compat,
)
from openenv_core.providers.docker import (
    ContainerOptions,
    DockerEngine,
    LocalDockerProvider,
    companion,
    start_container,
)

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]  # the first waits for the image

STEP = {"what": "identity"}
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "how",
    ["SIGKILL", *(pytest.param(how, marks=SOAK) for how in ("SIGTERM", "SIGINT", "SIGINT of a terminal"))],
)
def test_a_killed_owner_leaves_no_container(engine: DockerEngine, hostile_image: str, how: str) -> None:
    with owner(hostile_image) as owning:
        assert exists(engine, owning.container)
        kill = os.killpg if how.endswith("of a terminal") else os.kill  # a terminal signals the whole group
        kill(owning.process.pid, signal.Signals[how.split()[0]])
        owning.process.wait(WAIT_TIMEOUT_S)
        eventually(lambda: not exists(engine, owning.container), REMOVAL_TIMEOUT_S)
        eventually(lambda: not psutil.pid_exists(owning.companion))


HALFWAY = """
import sys, time
from openenv_core.providers.docker import DockerEngine, start_container
call = DockerEngine.call
def call_until_start(self, method, path, **options):
    if path.endswith("/start"):
        print(path.split("/")[2], flush=True)
        time.sleep(100)
    return call(self, method, path, **options)
DockerEngine.call = call_until_start
start_container(sys.argv[1])
"""


@SOAK
def test_an_owner_killed_between_create_and_start_leaves_no_container(
    engine: DockerEngine, hostile_image: str
) -> None:
    command = [sys.executable, "-c", HALFWAY, hostile_image]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        container = process.stdout.readline().strip()
        assert exists(engine, container)
        process.kill()
    eventually(lambda: not exists(engine, container), REMOVAL_TIMEOUT_S)


@SOAK
@pytest.mark.parametrize("how", ["raise", "end", "forget"])
def test_owner_that_exits_without_stop_leaves_no_container(
    engine: DockerEngine, hostile_image: str, how: str
) -> None:
    with owner(hostile_image, how) as owning:
        if how == "forget":  # the provider alone: the owner lives on
            assert owning.line().strip() == "forgotten"
        else:  # the owner's exit waits for the container's end
            owning.process.wait(WAIT_TIMEOUT_S)
        assert not exists(engine, owning.container)
        if how != "forget":
            eventually(lambda: not psutil.pid_exists(owning.companion))


@SOAK
def test_fork_that_outlives_the_owner_does_not_keep_the_container(
    engine: DockerEngine, hostile_image: str
) -> None:
    with owner(hostile_image, "fork") as owning:
        eventually(lambda: len(psutil.Process(owning.process.pid).children()) == 2)
        children = psutil.Process(owning.process.pid).children()
        [fork] = [each for each in children if each.pid != owning.companion]
        try:
            owning.process.kill()
            owning.process.wait(WAIT_TIMEOUT_S)
            eventually(lambda: not exists(engine, owning.container), REMOVAL_TIMEOUT_S)
            assert fork.is_running()
        finally:
            fork.kill()


@SOAK
def test_ended_fork_keeps_the_container_running(engine: DockerEngine, hostile_image: str) -> None:
    with owner(hostile_image, "a fork ends") as owning:
        assert owning.line().strip() == "True"
        assert exists(engine, owning.container)


@SOAK
def test_a_killed_companion_is_replaced(engine: DockerEngine, hostile_image: str) -> None:
    with owner(hostile_image) as owning:
        os.kill(owning.companion, signal.SIGKILL)
        family = psutil.Process(owning.process.pid)
        eventually(lambda: any(each.pid != owning.companion for each in family.children()))
        owning.process.kill()
        owning.process.wait(WAIT_TIMEOUT_S)
        eventually(lambda: not exists(engine, owning.container), REMOVAL_TIMEOUT_S)


@SOAK
def test_leftovers_of_owner_and_companion_are_removed_at_the_next_start(
    engine: DockerEngine, hostile_image: str
) -> None:
    with owner(hostile_image) as living, owner(hostile_image) as owning:
        # The companion first, while its owner cannot replace it.
        owning.process.send_signal(signal.SIGSTOP)
        os.kill(owning.companion, signal.SIGKILL)
        owning.process.kill()
        owning.process.wait(WAIT_TIMEOUT_S)
        time.sleep(1)
        assert exists(engine, owning.container)  # nobody has seen it yet
        with owner(hostile_image) as third:
            eventually(lambda: not exists(engine, owning.container), REMOVAL_TIMEOUT_S)
            # Those who live are let alone.
            assert exists(engine, living.container)
            assert exists(engine, third.container)


@SOAK
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("die", "ended with exit code 3"),
        # Engines lose the kernel's notice where a container ends quickly; then it is said as what it may be.
        ("memory", r"exit code 137(, killed for its memory|; something killed it: raise memory if)"),
        ("silent", "on port 8000 to be healthy within 2 s"),
        ("drip", "on port 8000 to be healthy within 2 s"),
    ],
)
def test_failed_start_reports_why_and_leaves_no_container(
    engine: DockerEngine, hostile_image: str, how: str, expected: str
) -> None:
    options = ContainerOptions(
        env_vars={"HOSTILE_START": how},
        memory="64m" if how == "memory" else None,
        start_timeout_s=2 if how in ("silent", "drip") else 60,
        labels={"ropewalk-test": how},
    )
    with pytest.raises(ServerStartError, match=expected) as raised:
        start_container(hostile_image, options)
    assert how != "die" or raised.value.output == "dying on purpose\n"
    assert engine.list_labelled(f"ropewalk-test={how}") == []


@SOAK
def test_death_of_a_running_server_is_detected(engine: DockerEngine, hostile_image: str) -> None:
    with LocalDockerProvider(hostile_image) as provider, LocalDockerProvider(hostile_image):
        # One companion serves all containers of a process.
        mine = {companion.PROGRAM, json.dumps(engine.address)}
        companion_pids = [each.pid for each in psutil.Process().children() if mine <= set(each.cmdline())]
        assert companion_pids == [companion.ensure(engine.address).pid]
        assert provider.alive
        assert provider.container is not None
        assert len(pids_of(provider.container)) >= 2  # init and the server
        os.kill(pids_of(provider.container)[0], signal.SIGKILL)
        eventually(lambda: not provider.alive)
        assert "[the container ended with exit code 137]" in provider.output()


def test_provider_can_be_restarted(engine: DockerEngine, hostile_image: str) -> None:
    provider = LocalDockerProvider(hostile_image)
    assert (provider.url, provider.alive, provider.output()) == (None, False, "")
    url = provider.start()
    assert provider.start() == url == provider.url
    first = provider.container
    assert first is not None
    # Published on the loopback interface alone.
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
    port = int(url.rpartition(":")[2])
    listening = {
        each.laddr.ip
        for each in psutil.net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    assert listening <= {"127.0.0.1"}
    with GenericEnvClient(url).sync() as client:
        client.reset()
        assert client.step(STEP).observation["said"] == "0:0"
    provider.stop()
    provider.stop()
    assert not exists(engine, first.id)
    assert not first.alive()
    provider.start()
    assert provider.container is not None
    assert provider.container.id != first.id
    provider.stop()


@SOAK
def test_a_start_under_way_ends_when_it_is_stopped(engine: DockerEngine, hostile_image: str) -> None:
    labels = {"ropewalk-test": "stopped"}
    provider = LocalDockerProvider(hostile_image, env_vars={"HOSTILE_START": "silent"}, labels=labels)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(provider.start)
        eventually(lambda: engine.list_labelled("ropewalk-test=stopped"))
        provider.stop()
        with pytest.raises(ProviderError, match="it was stopped meanwhile"):
            starting.result(WAIT_TIMEOUT_S)
    assert engine.list_labelled("ropewalk-test=stopped") == []


# ---- limits, as a hostile environment feels them


@contextmanager
def trying(image: str, **options: Any) -> Iterator[Callable[..., str]]:
    with GenericEnvClient.from_docker_image(image, **options) as client:
        client.reset()

        def attempt(what: str, amount: int = 0, text: str = "") -> str:
            return str(client.step({"what": what, "amount": amount, "text": text}).observation["said"])

        yield attempt


def test_container_is_hardened_by_default(hostile_image: str) -> None:
    with trying(hostile_image) as attempt:
        assert "Read-only file system" in attempt("write", text="/etc/passwd")
        assert "Read-only file system" in attempt("write", text="/app/hostile.py")
        assert "Operation not permitted" in attempt("give_away", text="/tmp/mine")
        assert "Permission denied" in attempt("execute", text="/tmp/script")
        status = dict(line.split(":\t", 1) for line in attempt("read", text="/proc/self/status").splitlines())
        assert status["NoNewPrivs"] == "1"
        for kind in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"):
            assert int(status[kind], 16) == 0
        assert attempt("processes").split()[0] == "docker-init"
        assert attempt("zombie") == "0"
        assert attempt("write", text="/tmp/mine") == "written"
        assert "No space left" in attempt("write", 300, "/tmp/mine")


def test_memory_limit_kills_the_process_over_it(hostile_image: str) -> None:
    provider = LocalDockerProvider(hostile_image, memory="128m")
    with GenericEnvClient(provider=provider).sync() as client:
        client.reset()
        # A child alone: the server lives on.
        outcome = client.step({"what": "memory_of_child", "amount": 200})
        assert outcome.observation["said"] == "exit code -9"
        assert provider.alive
        with pytest.raises(ConnectionLostError, match=r"exit code 137, killed for its memory"):
            client.step({"what": "memory", "amount": 200})
        assert not provider.alive


@SOAK
def test_process_limit_holds_and_no_network_reaches_nothing(hostile_image: str) -> None:
    with trying(hostile_image, pids=40, network="none") as attempt:
        count, rest = attempt("fork", 100).split(" ", 1)
        assert 20 <= int(count) < 40
        assert rest == "processes, then BlockingIOError"
        assert attempt("interfaces") == "lo"
        for place in ("172.17.0.1:22", "1.1.1.1:53"):
            assert "Network is unreachable" in attempt("connect", text=place)


@SOAK
def test_internal_network_is_reached_through_the_engine(hostile_image: str, engine: Any) -> None:
    engine.call("POST", "/networks/create", body={"Name": "ropewalk-test-inside", "Internal": True})
    try:
        with trying(hostile_image, network="ropewalk-test-inside") as attempt:
            assert attempt("interfaces") == "lo eth0"
            assert attempt("connect", text="1.1.1.1:53") == "TimeoutError: timed out"
    finally:
        engine.call("DELETE", "/networks/ropewalk-test-inside")


# ---- options that cannot be honoured


@SOAK
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cpus": 4000}, OptionUnavailableError, "Range of CPUs"),
        ({"cap_add": ["NO_SUCH"]}, OptionUnavailableError, "NO_SUCH"),
        ({"network": "no-such-network"}, OptionUnavailableError, "docker network create no-such-network"),
        ({"user": "nobody-at-all"}, EngineRefusedError, "nobody-at-all"),
        ({"tmpfs": {"/work": "size=nonsense"}}, EngineRefusedError, "size=nonsense"),
        ({"memory": "5m"}, ConfigurationError, "at least 6m"),
        ({"gpus": "all"}, OptionUnavailableError, "expected a Docker engine with GPUs"),
    ],
)
def test_unsupported_options_are_refused(
    engine: DockerEngine, hostile_image: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    if "gpus" in options and "nvidia" in (engine.call("GET", "/info").get("Runtimes") or {}):
        pytest.skip("this engine has GPUs")
    before = {each["Id"] for each in engine.list_labelled("ropewalk.owner")}
    with pytest.raises(error, match=says):
        LocalDockerProvider(hostile_image, **options).start()
    ours = [each for each in engine.list_labelled("ropewalk.owner") if each["Id"] not in before]
    assert [each for each in ours if each["Image"] == hostile_image and each["State"] == "created"] == []


@SOAK
def test_dropped_limit_of_the_engine_is_detected(
    engine: DockerEngine, hostile_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = DockerEngine.inspect

    def without_the_limit(self: DockerEngine, container: str) -> dict[str, Any]:
        inspected = inspect(self, container)
        inspected["HostConfig"]["Memory"] = 0
        return inspected

    monkeypatch.setattr(DockerEngine, "inspect", without_the_limit)
    with pytest.raises(OptionUnavailableError, match=r"HostConfig.Memory: asked 104857600, got 0"):
        start_container(hostile_image, ContainerOptions(memory="100m"))


# ---- clients that bring their container


@SOAK
def test_a_client_of_an_image_sync_and_async(engine: DockerEngine, hostile_image: str) -> None:
    labels = {"ropewalk-test": "client"}
    token = "a-token-of-many-characters"
    guarded = {"env_vars": {"ROPEWALK_TOKENS": f"another-of-many-characters,{token}"}, "token": token}
    options = {"labels": labels, "message_timeout_s": 30, **guarded}
    with GenericEnvClient.from_docker_image(hostile_image, **options) as client:
        client.reset()
        assert client.step(STEP).observation["said"] == "0:0"
        assert len(engine.list_labelled("ropewalk-test=client")) == 1
    assert engine.list_labelled("ropewalk-test=client") == []

    async def play() -> str:
        options = ContainerOptions(labels=labels, user="7:7")
        async with await GenericEnvClient.from_docker_image(hostile_image, options=options) as client:
            await client.reset()
            return str((await client.step(STEP)).observation["said"])

    assert asyncio.run(play()) == "7:7"
    assert engine.list_labelled("ropewalk-test=client") == []


@SOAK
def test_the_released_provider_is_ours(engine: DockerEngine, hostile_image: str) -> None:
    compat.install()
    try:
        released = importlib.import_module("openenv.core.containers.runtime")
        provider = released.LocalDockerProvider()
        assert isinstance(provider, released.ContainerProvider)
        command = "ropewalk serve hostile:app --host 0.0.0.0"
        url = provider.start_container(hostile_image, env_vars={"A": "b"}, command=command, pids=99)
        try:
            provider.wait_for_ready(url, timeout_s=10)
            with GenericEnvClient(url).sync() as client:
                client.reset()
                assert client.step({"what": "variable", "text": "A"}).observation["said"] == "b"
            with pytest.raises(ConfigurationError, match="has started a container already"):
                provider.start_container(hostile_image)
        finally:
            provider.stop_container()
        provider.stop_container()
        # Given to a client, it is told what to run; and its host port is the one asked for.
        port = free_port()
        with GenericEnvClient.from_docker_image(hostile_image, provider=provider, port=port) as client:
            client.reset()
            assert provider._provider.url == f"http://127.0.0.1:{port}"
            assert client.step(STEP).observation["said"] == "0:0"
        assert provider._provider is None
    finally:
        uninstall_hook()
