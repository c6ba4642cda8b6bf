"""What is settled before any engine is asked: options, sizes, addresses, owners, and whether something was dropped."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openenv_core import ConfigurationError, ContainerOptions, EngineUnavailable
from openenv_core.providers.docker import Container, Engine, _companion, _owner, companion, start_container
from openenv_core.providers.docker._wire import Address
from openenv_core.providers.docker.address import find_engine, is_local
from openenv_core.providers.docker.spec import dropped, spec


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        ("512m", 2**29),
        ("2g", 2**31),
        ("1.5G", 3 * 2**29),
        (" 64 MiB ", 2**26),
        ("7000000", 7_000_000),
        (2**30, 2**30),
    ],
)
def test_sizes(memory: str | int, size: int) -> None:
    assert ContainerOptions(memory=memory).memory_bytes == size


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 0},
        {"port": "8000"},
        {"host_port": 70_000},
        {"env_vars": {"A": 1}},
        {"env_vars": {"A=B": "c"}},
        {"labels": {"ropewalk.owner": "me"}},
        {"memory": "much"},
        {"memory": -1},
        {"memory": "1m"},
        {"memory": True},
        {"swap": "1g"},
        {"cpus": 0},
        {"cpus": float("nan")},
        {"cpus": "2"},
        {"pids": 0},
        {"pids": -1},
        {"network": ""},
        {"network": "host"},
        {"network": "container:other"},
        {"network": "none", "reach": "port"},
        {"reach": "magic"},
        {"tmpfs": "/tmp"},
        {"tmpfs": ("tmp",)},
        {"tmpfs": ("/",)},
        {"tmpfs": {"/tmp": 1}},
        {"gpus": 0},
        {"gpus": ""},
        {"gpus": True},
        {"cap_drop": "ALL"},
        {"command": "ropewalk serve"},
        {"read_only": "yes"},
        {"user": ""},
        {"user": 0},
        {"start_timeout_s": 0},
        {"stop_timeout_s": -1},
        {"stop_timeout_s": 1e10},
        {"start_timeout_s": float("inf")},
        {"memory": 10**30},
        {"memory": "9" * 400},
        {"cpus": 1e-12},
        {"cpus": 1e300},
        {"pids": 10**30},
        {"env_vars": {"A": "b\0c"}},
        {"labels": {"a\0": "b"}},
        {"command": ()},
        {"command": ("a\0",)},
    ],
    ids=str,
)
def test_values_that_no_engine_could_honour_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        ContainerOptions(**fields)


def test_a_server_of_ours_is_asked_with_its_token_which_nobody_sees() -> None:
    options = ContainerOptions(env_vars={"ROPEWALK_TOKENS": " first-of-two, second-of-two"})
    assert options.token == "first-of-two"
    assert ContainerOptions().token is None
    assert ContainerOptions(env_vars={"ROPEWALK_TOKENS": " "}).token is None
    assert "of-two" not in repr(options)
    asked = spec("image", options, {}, publish=True)
    found = {"HostConfig": asked["HostConfig"], "Config": {**asked, "Env": []}}
    assert dropped(asked, found) == ["Env: asked ['ROPEWALK_TOKENS'], got none"]


def test_options_stay_as_they_were_checked() -> None:
    variables = {"A": "b"}
    options = ContainerOptions(env_vars=variables)
    variables["C"] = "d"
    assert dict(options.env_vars) == {"A": "b"}
    with pytest.raises(TypeError):
        options.env_vars["C"] = "d"  # type: ignore[index]
    words = ["serve"]
    options = ContainerOptions(command=words)
    words.append("--more")
    assert options.command == ("serve",)


@pytest.mark.parametrize(
    ("gpus", "asked"),
    [
        ("all", {"Count": -1}),
        (2, {"Count": 2}),
        ("0, 2", {"DeviceIDs": ["0", "2"]}),
        ("GPU-1f", {"DeviceIDs": ["GPU-1f"]}),
    ],
)
def test_gpus_as_the_engine_is_asked_for_them(gpus: str | int, asked: dict[str, Any]) -> None:
    [request] = spec("image", ContainerOptions(gpus=gpus), {}, publish=True)["HostConfig"]["DeviceRequests"]
    assert request == {"Driver": "", "Capabilities": [["gpu"]], **asked}


def test_what_the_engine_dropped_is_named() -> None:
    options = ContainerOptions(memory="64m", gpus=1, env_vars={"A": "b"}, tmpfs={"/tmp": "size=1m"})
    asked = spec("image", options, {"ropewalk.owner": "me"}, publish=True)
    found = {"HostConfig": json.loads(json.dumps(asked["HostConfig"])), "Config": {**asked, "More": 1}}
    assert dropped(asked, found) == []
    host = found["HostConfig"]
    for change, where in (
        (lambda: host.update(MemorySwap=-1), "HostConfig.MemorySwap"),
        (lambda: host.update(PidsLimit=None), "HostConfig.PidsLimit"),
        (lambda: host.update(CapDrop=None), "HostConfig.CapDrop"),
        (lambda: host["Tmpfs"].clear(), "HostConfig.Tmpfs./tmp"),
        (lambda: host.update(DeviceRequests=None), "HostConfig.DeviceRequests"),
        (lambda: host.update(ReadonlyRootfs=False), "HostConfig.ReadonlyRootfs"),
        (lambda: found["Config"].update(Env=["PATH=/bin"]), "Env"),
    ):
        before = len(dropped(asked, found))
        change()
        after = dropped(asked, found)
        assert len(after) == before + 1
        assert any(line.startswith(f"{where}:") for line in after)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def test_the_engine_is_the_usual_one_unless_something_names_another(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_engine() == Address("unix:///var/run/docker.sock")
    context = nowhere / "contexts" / "meta" / hashlib.sha256(b"mine").hexdigest()
    context.mkdir(parents=True)
    (nowhere / "config.json").write_text(json.dumps({"currentContext": "mine"}))
    with pytest.raises(EngineUnavailable, match="context 'mine'"):
        find_engine()
    (context / "meta.json").write_text(json.dumps({"Endpoints": {"docker": {"Host": "unix:///mine.sock"}}}))
    assert find_engine() == Address("unix:///mine.sock")
    monkeypatch.setenv("DOCKER_HOST", "tcp://engine.example:2376")
    assert find_engine() == Address("tcp://engine.example:2376", None, False)
    assert not is_local(find_engine())
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    assert find_engine() == Address("tcp://engine.example:2376", str(nowhere), True)
    for host in (
        "ssh://me@engine.example",
        "unix://run/docker.sock",
        "unix://",
        "tcp://engine:port",
        "tcp://[::",
    ):
        monkeypatch.setenv("DOCKER_HOST", host)
        with pytest.raises(ConfigurationError, match="ssh -L"):
            find_engine()
    monkeypatch.setenv("DOCKER_HOST", "tcp://[::1]:2375")
    assert is_local(find_engine())


def test_a_forgotten_container_whose_engine_is_away_is_left_to_the_companion(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = companion.ensure(Address("unix:///nowhere/docker.sock"))
    with ours.making("forgotten"):
        container = Container(
            Engine(Address("unix:///nowhere/docker.sock")),
            "id",
            "forgotten",
            "image",
            ContainerOptions(),
            ours,
        )
    del container
    assert "is left to the companion process" in caplog.text
    assert "Traceback" not in capsys.readouterr().err
    ours.gone("forgotten")


def test_an_engine_that_is_not_there_is_told_from_one_that_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Engine(Address(f"unix://{tmp_path}/none.sock"))
    with pytest.raises(EngineUnavailable, match=r"systemctl start docker"):
        start_container("image", engine=absent)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("openenv_core.providers.docker._wire.dial", refused)
    with pytest.raises(EngineUnavailable, match=r"usermod -aG docker"):
        absent.ping()


def test_who_is_gone() -> None:
    me = _owner.owner()
    assert _owner.parse(str(me)) == me
    assert _owner.parse("somebody-else") is None
    assert _owner.is_gone(me) is False
    assert _owner.is_gone(_owner.owner(os.getppid())) is False
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = _owner.owner(child.pid)
        assert _owner.is_gone(other) is False
        assert _owner.is_gone(other._replace(start="1")) is True  # its number went to another
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert _owner.is_gone(other) is True  # not waited for, and still over
    assert _owner.is_gone(other) is True
    assert _owner.is_gone(other._replace(boot="another")) is None
    assert _owner.is_gone(other._replace(namespace="1")) is None


@pytest.mark.parametrize(
    ("change", "state", "age_s", "orphan"),
    [
        ({}, "running", 0, False),  # ours
        ({"pid": 2**22 + 1}, "running", 0, True),
        ({"pid": 2**22 + 1, "namespace": "1"}, "exited", 9999, False),
        ({"boot": "before"}, "running", 9999, False),
        ({"boot": "before"}, "exited", 9999, True),
        ({"boot": "before"}, "exited", 1, False),
    ],
    ids=str,
)
def test_what_is_swept(change: dict[str, Any], state: str, age_s: float, orphan: bool) -> None:
    me = _owner.owner()
    labels = {_owner.LABEL: str(me._replace(**change))}
    container = {"Labels": labels, "State": state, "Created": _companion.time.time() - age_s}
    assert _companion.orphaned(container, me, Address("unix:///var/run/docker.sock")) is orphan
    # An engine that other machines share: their boots are not known here.
    if "boot" in change:
        assert _companion.orphaned(container, me, Address("tcp://engine:2376")) is False
