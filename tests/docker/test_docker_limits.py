"""What a hostile environment feels of its container's limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from openenv_core import ConnectionLost, GenericEnvClient
from openenv_core.providers.docker import LocalDockerProvider

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]  # the first waits for the image


@contextmanager
def trying(image: str, **options: Any) -> Iterator[Callable[..., str]]:
    with GenericEnvClient.from_docker_image(image, **options) as client:
        client.reset()

        def attempt(what: str, amount: int = 0, text: str = "") -> str:
            return str(client.step({"what": what, "amount": amount, "text": text}).observation["said"])

        yield attempt


def test_by_default_there_is_little_to_be_had(hostile_image: str) -> None:
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


@pytest.mark.soak
def test_what_is_given_back_is_had(hostile_image: str) -> None:
    options = {
        "read_only": False,
        "cap_drop": (),
        "no_new_privileges": False,
        "init": False,
        "tmpfs": {"/tmp": "exec"},
    }
    with trying(hostile_image, **options) as attempt:
        assert attempt("write", text="/etc/new") == "written"
        assert attempt("give_away", text="/etc/new") == "changed"
        assert attempt("execute", text="/tmp/script") == "ran"
        assert "NoNewPrivs:\t0" in attempt("read", text="/proc/self/status")
        assert "docker-init" not in attempt("processes")


def test_memory_kills_whoever_takes_too_much(hostile_image: str) -> None:
    provider = LocalDockerProvider(hostile_image, memory="128m")
    with GenericEnvClient(provider=provider).sync() as client:
        client.reset()
        # A child alone: the server lives on.
        outcome = client.step({"what": "memory_of_child", "amount": 200})
        assert outcome.observation["said"] == "exit code -9"
        assert provider.alive
        with pytest.raises(ConnectionLost, match=r"exit code 137, killed for its memory"):
            client.step({"what": "memory", "amount": 200})
        assert not provider.alive


@pytest.mark.soak
def test_no_more_processes_than_allowed(hostile_image: str) -> None:
    with trying(hostile_image, pids=40) as attempt:
        count, rest = attempt("fork", 100).split(" ", 1)
        assert 20 <= int(count) < 40
        assert rest == "processes, then BlockingIOError"
    with trying(hostile_image, pids=None) as attempt:
        assert attempt("fork", 300) == "300 processes"


@pytest.mark.soak
def test_half_a_cpu_is_half_a_cpu(hostile_image: str) -> None:
    with trying(hostile_image, cpus=0.3) as attempt:
        assert float(attempt("work", 2000)) < 0.6


@pytest.mark.soak
def test_no_network_is_none(hostile_image: str) -> None:
    with trying(hostile_image, network="none") as attempt:
        assert attempt("interfaces") == "lo"
        for place in ("172.17.0.1:22", "1.1.1.1:53"):
            assert "Network is unreachable" in attempt("connect", text=place)
    with trying(hostile_image) as attempt:
        assert attempt("interfaces") == "lo eth0"


@pytest.mark.soak
def test_a_network_without_a_way_out_is_entered_through_the_engine(hostile_image: str, engine: Any) -> None:
    engine.call("POST", "/networks/create", body={"Name": "ropewalk-test-inside", "Internal": True})
    try:
        with trying(hostile_image, network="ropewalk-test-inside") as attempt:
            assert attempt("interfaces") == "lo eth0"
            assert attempt("connect", text="1.1.1.1:53") == "TimeoutError: timed out"
    finally:
        engine.call("DELETE", "/networks/ropewalk-test-inside")


@pytest.mark.soak
def test_users_and_variables(hostile_image: str) -> None:
    with trying(hostile_image, user="1234:99", env_vars={"COLOUR": "red"}) as attempt:
        assert attempt("identity") == "1234:99"
        assert attempt("variable", text="COLOUR") == "red"


@pytest.mark.soak
def test_printing_does_not_fill_the_disk(hostile_image: str) -> None:
    provider = LocalDockerProvider(hostile_image)
    with GenericEnvClient(provider=provider).sync() as client:
        client.reset()
        client.step({"what": "say", "amount": 30})
        assert len(provider.output()) <= 16_384
        assert provider.container is not None
        kept = provider.container._engine.logs(provider.container.id, 100_000)
        assert len(kept) < 15 * 2**20
