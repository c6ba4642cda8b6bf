"""Every option, looked up at the engine after a start: what was asked for is what the container has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from openenv_core import ConfigurationError, EngineRefused, ImageNotFound, OptionUnavailable
from openenv_core.providers.docker import ContainerOptions, Engine, LocalDockerProvider, start_container

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(600)]  # the first waits for the image


@contextmanager
def inspected(engine: Engine, image: str, **fields: Any) -> Iterator[dict[str, Any]]:
    with LocalDockerProvider(image, **fields) as provider:
        assert provider.container is not None
        yield engine.inspect(provider.container.id)


def test_what_a_container_gets_by_default(engine: Engine, hostile_image: str) -> None:
    with inspected(engine, hostile_image) as found:
        host = found["HostConfig"]
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert host["ReadonlyRootfs"] is True
        assert host["PidsLimit"] == 256
        assert host["Init"] is True
        assert host["Privileged"] is False
        assert list(host["Tmpfs"]) == ["/tmp"]
        assert host["LogConfig"]["Config"] == {"max-size": "5m", "max-file": "2"}
        assert not host["Binds"]
        [binding] = found["NetworkSettings"]["Ports"]["8000/tcp"]
        assert binding["HostIp"] == "127.0.0.1"


def test_every_option_is_what_the_engine_has(engine: Engine, hostile_image: str) -> None:
    options = {
        "port": 8123,
        "env_vars": {"PORT": "8123", "COLOUR": "red = not blue"},
        "memory": "200m",
        "swap": "10m",
        "cpus": 0.75,
        "pids": 77,
        "tmpfs": {"/tmp": "size=1m", "/work": ""},
        "labels": {"project": "seven"},
        "cap_drop": ["NET_RAW", "MKNOD"],
        "cap_add": ["SYS_NICE"],
        "user": "1234:99",
    }
    with inspected(engine, hostile_image, **options) as found:
        host, config = found["HostConfig"], found["Config"]
        assert list(found["NetworkSettings"]["Ports"]) == ["8123/tcp"]
        assert {"PORT=8123", "COLOUR=red = not blue"} <= set(config["Env"])
        assert (host["Memory"], host["MemorySwap"]) == (200 * 2**20, 210 * 2**20)
        assert host["NanoCpus"] == 750_000_000
        assert host["PidsLimit"] == 77
        assert host["Tmpfs"]["/tmp"] == "size=1m"
        assert "noexec" in host["Tmpfs"]["/work"]
        assert config["Labels"]["project"] == "seven"
        assert host["CapDrop"] == ["NET_RAW", "MKNOD"] or host["CapDrop"] == ["CAP_NET_RAW", "CAP_MKNOD"]
        assert host["CapAdd"][0].endswith("SYS_NICE")
        assert config["User"] == "1234:99"


def test_each_fence_comes_down_by_its_name(engine: Engine, hostile_image: str) -> None:
    options = {
        "read_only": False,
        "cap_drop": (),
        "no_new_privileges": False,
        "pids": None,
        "init": False,
        "tmpfs": (),
        "memory": "300m",
        "swap": None,
        "command": ["ropewalk", "serve", "hostile:app", "--host", "0.0.0.0"],
    }
    with inspected(engine, hostile_image, **options) as found:
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"] is False
        assert not host["CapDrop"]
        assert not host["SecurityOpt"]
        assert not host["PidsLimit"]
        assert not host["Init"]
        assert not host.get("Tmpfs")
        assert host["MemorySwap"] == -1
        assert found["Config"]["Cmd"] == options["command"]


def test_a_network_by_its_name(engine: Engine, hostile_image: str) -> None:
    engine.call("POST", "/networks/create", body={"Name": "ropewalk-test"})
    try:
        with inspected(engine, hostile_image, network="ropewalk-test") as found:
            assert list(found["NetworkSettings"]["Networks"]) == ["ropewalk-test"]
    finally:
        engine.call("DELETE", "/networks/ropewalk-test")


@pytest.mark.parametrize("gpus", ["all", 1, "0,1"])
def test_gpus_are_asked_for_and_refused_where_there_are_none(
    engine: Engine, hostile_image: str, gpus: str | int
) -> None:
    if "nvidia" in (engine.call("GET", "/info").get("Runtimes") or {}):
        pytest.skip("this engine has GPUs")
    with pytest.raises(OptionUnavailable, match="expected a Docker engine with GPUs"):
        start_container(hostile_image, ContainerOptions(gpus=gpus))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cpus": 4000}, OptionUnavailable, "Range of CPUs"),
        ({"cap_add": ["NO_SUCH"]}, OptionUnavailable, "NO_SUCH"),
        ({"network": "no-such-network"}, OptionUnavailable, "docker network create no-such-network"),
        ({"user": "nobody-at-all"}, EngineRefused, "nobody-at-all"),
        ({"tmpfs": {"/work": "size=nonsense"}}, EngineRefused, "size=nonsense"),
        ({"memory": "5m"}, ConfigurationError, "at least 6m"),
        ({"memmory": "50m"}, ConfigurationError, "did you mean memory"),
    ],
)
def test_what_cannot_be_honoured_raises(
    engine: Engine, hostile_image: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    before = {each["Id"] for each in engine.labelled("ropewalk.owner")}
    with pytest.raises(error, match=says):
        LocalDockerProvider(hostile_image, **options).start()
    ours = [each for each in engine.labelled("ropewalk.owner") if each["Id"] not in before]
    assert [each for each in ours if each["Image"] == hostile_image and each["State"] == "created"] == []


def test_an_engine_that_drops_a_limit_is_found_out(
    engine: Engine, hostile_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = Engine.inspect

    def without_the_limit(self: Engine, container: str) -> dict[str, Any]:
        found = inspect(self, container)
        found["HostConfig"]["Memory"] = 0
        return found

    monkeypatch.setattr(Engine, "inspect", without_the_limit)
    with pytest.raises(OptionUnavailable, match=r"HostConfig.Memory: asked 104857600, got 0"):
        start_container(hostile_image, ContainerOptions(memory="100m"))


def test_a_missing_image_names_what_builds_it(engine: Engine) -> None:
    with pytest.raises(ImageNotFound, match="ropewalk build PATH"):
        start_container("ropewalk-no-such-image:1")
