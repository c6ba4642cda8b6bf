"""Container settings without an engine: options, addresses, owners, dropped limits, health checks, providers."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from fake_engine import fake_engine

from openenv_core import ConfigurationError, ContainerOptions, EngineUnavailableError, GenericEnvClient
from openenv_core.providers.base import status_of
from openenv_core.providers.docker import (
    Container,
    DockerEngine,
    start_container,
    sweeper,
)
from openenv_core.providers.docker.attach import EngineAddress
from openenv_core.providers.docker.engine import find_engine, is_local
from openenv_core.providers.docker.options import find_dropped, spec


def test_sizes_are_parsed() -> None:
    for memory, size in (("1.5G", 3 * 2**29), (" 64 MiB ", 2**26), ("7000000", 7_000_000), (2**30, 2**30)):
        assert ContainerOptions(memory=memory).memory_bytes == size


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 0},
        {"env_vars": {"A": 1}},
        {"env_vars": {"A=B": "c"}},
        {"labels": {"ropewalk.owner": "me"}},
        {"memory": "much"},
        {"memory": "1m"},
        {"swap": "1g"},
        {"cpus": 0},
        {"pids": 0},
        {"network": ""},
        {"network": "host"},
        {"network": "container:other"},
        {"tmpfs": "/tmp"},
        {"tmpfs": ("/",)},
        {"tmpfs": {"/tmp": 1}},
        {"gpus": 0},
        {"cap_drop": "ALL"},
        {"command": "ropewalk serve"},
        {"read_only": "yes"},
        {"stop_timeout_s": -1},
        {"start_timeout_s": float("inf")},
        {"env_vars": {"A": "b\0c"}},
        {"command": ()},
    ],
    ids=str,
)
def test_invalid_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        ContainerOptions(**fields)


def test_health_check_uses_the_token_without_exposing_it() -> None:
    options = ContainerOptions(env_vars={"ROPEWALK_TOKENS": " first-of-two, second-of-two"})
    assert options.token == "first-of-two"
    assert ContainerOptions().token is None
    assert ContainerOptions(env_vars={"ROPEWALK_TOKENS": " "}).token is None
    assert "of-two" not in repr(options)
    create_body = spec("image", options, {}, publish=True)
    inspected = {"HostConfig": create_body["HostConfig"], "Config": {**create_body, "Env": []}}
    assert find_dropped(create_body, inspected) == ["Env: asked ['ROPEWALK_TOKENS'], got none"]


def test_options_are_copied_when_checked() -> None:
    variables = {"A": "b"}
    options = ContainerOptions(env_vars=variables)
    variables["C"] = "d"
    assert dict(options.env_vars) == {"A": "b"}
    with pytest.raises(TypeError):
        options.env_vars["C"] = "d"  # type: ignore[index]
    command = ["serve"]
    options = ContainerOptions(command=command)
    command.append("--more")
    assert options.command == ("serve",)


def test_a_container_is_hardened_by_default() -> None:
    create_body = spec("image", ContainerOptions(), {}, publish=True)
    host = create_body["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert not host.get("CapAdd")
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["ReadonlyRootfs"], host["Init"], host["PidsLimit"]) == (True, True, 256)
    assert not host.get("Privileged")
    assert not host.get("Binds")
    assert list(host["Tmpfs"]) == ["/tmp"]
    assert host["LogConfig"]["Config"] == {"max-size": "5m", "max-file": "2"}
    [binding] = host["PortBindings"]["8000/tcp"]
    assert binding["HostIp"] == "127.0.0.1"


def test_every_option_reaches_the_engine() -> None:
    options = ContainerOptions(
        port=8123,
        env_vars={"COLOUR": "red = not blue"},
        memory="200m",
        swap="10m",
        cpus=0.75,
        pids=77,
        tmpfs={"/tmp": "size=1m", "/work": ""},
        labels={"project": "seven"},
        cap_drop=["NET_RAW", "MKNOD"],
        cap_add=["SYS_NICE"],
        user="1234:99",
        network="mine",
    )
    create_body = spec("image", options, {"ropewalk.owner": "me"}, publish=True)
    host = create_body["HostConfig"]
    assert list(host["PortBindings"]) == ["8123/tcp"]
    assert "COLOUR=red = not blue" in create_body["Env"]
    assert (host["Memory"], host["MemorySwap"]) == (200 * 2**20, 210 * 2**20)
    assert (host["NanoCpus"], host["PidsLimit"]) == (750_000_000, 77)
    assert host["Tmpfs"]["/tmp"] == "size=1m"
    assert "noexec" in host["Tmpfs"]["/work"]
    assert create_body["Labels"] == {"project": "seven", "ropewalk.owner": "me"}
    assert (host["CapDrop"], host["CapAdd"]) == (["NET_RAW", "MKNOD"], ["SYS_NICE"])
    assert (create_body["User"], host["NetworkMode"]) == ("1234:99", "mine")
    for gpus, devices in (("all", {"Count": -1}), (2, {"Count": 2}), ("0, 2", {"DeviceIDs": ["0", "2"]})):
        [request] = spec("image", ContainerOptions(gpus=gpus), {}, publish=True)["HostConfig"][
            "DeviceRequests"
        ]
        assert request == {"Driver": "", "Capabilities": [["gpu"]], **devices}


def test_each_restriction_can_be_lifted_by_name() -> None:
    options = ContainerOptions(
        read_only=False,
        cap_drop=(),
        no_new_privileges=False,
        pids=None,
        init=False,
        tmpfs=(),
        memory="300m",
        swap=None,
        command=["serve"],
    )
    create_body = spec("image", options, {}, publish=False)
    host = create_body["HostConfig"]
    for name in ("ReadonlyRootfs", "CapDrop", "SecurityOpt", "Init", "Tmpfs", "PidsLimit"):
        assert not host.get(name), name
    assert host["MemorySwap"] == -1
    assert create_body["Cmd"] == ["serve"]


def test_dropped_settings_of_the_engine_are_named() -> None:
    options = ContainerOptions(memory="64m", gpus=1, env_vars={"A": "b"}, tmpfs={"/tmp": "size=1m"})
    create_body = spec("image", options, {"ropewalk.owner": "me"}, publish=True)
    inspected = {
        "HostConfig": json.loads(json.dumps(create_body["HostConfig"])),
        "Config": {**create_body, "More": 1},
    }
    assert find_dropped(create_body, inspected) == []
    host = inspected["HostConfig"]
    for change, where in (
        (lambda: host.update(MemorySwap=-1), "HostConfig.MemorySwap"),
        (lambda: host.update(PidsLimit=None), "HostConfig.PidsLimit"),
        (lambda: host.update(CapDrop=None), "HostConfig.CapDrop"),
        (lambda: host["Tmpfs"].clear(), "HostConfig.Tmpfs"),
        (lambda: host.update(DeviceRequests=None), "HostConfig.DeviceRequests"),
        (lambda: host.update(ReadonlyRootfs=False), "HostConfig.ReadonlyRootfs"),
        (lambda: inspected["Config"].update(Env=["PATH=/bin"]), "Env"),
    ):
        before = len(find_dropped(create_body, inspected))
        change()
        after = find_dropped(create_body, inspected)
        assert len(after) == before + 1
        assert any(line.startswith(f"{where}:") for line in after)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def test_engine_address_comes_from_environment_context_or_default(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_engine() == EngineAddress("unix:///var/run/docker.sock")
    context = nowhere / "contexts" / "meta" / hashlib.sha256(b"mine").hexdigest()
    context.mkdir(parents=True)
    (nowhere / "config.json").write_text(json.dumps({"currentContext": "mine"}))
    with pytest.raises(EngineUnavailableError, match="context 'mine'"):
        find_engine()
    (context / "meta.json").write_text(json.dumps({"Endpoints": {"docker": {"Host": "unix:///mine.sock"}}}))
    assert find_engine() == EngineAddress("unix:///mine.sock")
    monkeypatch.setenv("DOCKER_HOST", "tcp://engine.example:2376")
    assert find_engine() == EngineAddress("tcp://engine.example:2376", None, False)
    assert not is_local(find_engine())
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    assert find_engine() == EngineAddress("tcp://engine.example:2376", str(nowhere), True)
    for host in ("ssh://me@engine.example", "unix://run/docker.sock", "tcp://engine:port", "tcp://[::"):
        monkeypatch.setenv("DOCKER_HOST", host)
        with pytest.raises(ConfigurationError, match="ssh -L"):
            find_engine()
    monkeypatch.setenv("DOCKER_HOST", "tcp://[::1]:2375")
    assert is_local(find_engine())


def test_dropped_container_of_an_absent_engine_is_left_to_the_companion(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = DockerEngine(EngineAddress("unix:///nowhere/docker.sock"))
    container = Container(absent, "id", "forgotten", "image", ContainerOptions())
    del container
    assert "is left to the companion process" in caplog.text
    assert "Traceback" not in capsys.readouterr().err


def test_absent_engine_and_refused_access_are_different_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = DockerEngine(EngineAddress(f"unix://{tmp_path}/none.sock"))
    with pytest.raises(EngineUnavailableError, match=r"systemctl start docker"):
        start_container("image", engine=absent)

    refused = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("socket.socket.connect", refused)
    with pytest.raises(EngineUnavailableError, match=r"usermod -aG docker"):
        absent.ping()


def test_dead_owners_are_recognised() -> None:
    me = sweeper.owner()
    assert sweeper.parse(str(me)) == me
    assert sweeper.parse("somebody-else") is None
    assert sweeper.is_gone(me) is False
    assert sweeper.is_gone(sweeper.owner(os.getppid())) is False
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = sweeper.owner(child.pid)
        assert sweeper.is_gone(other) is False
        assert sweeper.is_gone(other._replace(start="1")) is True  # its number went to another
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert sweeper.is_gone(other) is True  # not waited for, and still over
    assert sweeper.is_gone(other) is True
    assert sweeper.is_gone(other._replace(boot="another")) is None
    assert sweeper.is_gone(other._replace(namespace="1")) is None


def test_only_containers_of_dead_owners_are_removed() -> None:
    me = sweeper.owner()
    dead: dict[str, Any] = {"pid": 2**22 + 1}
    rebooted = {"boot": "before"}
    for change, state, age_s, orphan in (
        ({}, "running", 0, False),  # ours
        (dead, "running", 0, True),
        ({**dead, "namespace": "1"}, "exited", 9999, False),
        (rebooted, "running", 9999, False),
        (rebooted, "exited", 9999, True),
        (rebooted, "exited", 1, False),
    ):
        labels = {sweeper.LABEL: str(me._replace(**change))}
        container = {"Labels": labels, "State": state, "Created": sweeper.time.time() - age_s}
        assert sweeper.is_orphaned(container, me, EngineAddress("unix:///var/run/docker.sock")) is orphan
        # An engine that other machines share: their boots are not known here.
        shared = EngineAddress("tcp://engine:2376")
        assert change != rebooted or sweeper.is_orphaned(container, me, shared) is False


# ---- what counts as an answer of /health

NESTED = b"HTTP/1.0 200 OK\r\n\r\n" + b'{"a":' * 10_000 + b"}" * 10_000
BODY = b'{"status": "healthy", "more": {"a": 1}}'


@contextmanager
def answering(*pieces: bytes, hang: bool = False) -> Iterator[tuple[int, list[bytes]]]:
    request_bytes: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                request_bytes.append(connection.recv(65_536))
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.01)
                if hang:
                    ending.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], request_bytes
        ending.set()
        thread.join(30)


@pytest.mark.parametrize("hang", [False, True], ids=["closing", "left open"])
def test_status_is_read_in_any_fragmentation(hang: bool) -> None:
    for pieces in (
        (b"HTTP/1.0 200 OK\r\n\r\n" + BODY,),
        (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 39\r\n\r\n", BODY[:9], BODY[9:-1], BODY[-1:]),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n27\r\n" + BODY + b"\r\n0\r\n\r\n",),
    ):
        with answering(*pieces, hang=hang) as (port, request_bytes):
            assert status_of(port, 20, "some-token") == "healthy"
            assert b"\r\nAuthorization: Bearer some-token\r\n" in request_bytes[0]


def test_invalid_status_is_refused() -> None:
    refused = b"HTTP/1.1 401 Unauthorized\r\n\r\n{}"
    for response in (refused, b"SSH-2.0-x\r\n", b"HTTP/1.0 200 OK\r\n\r\n[1]", NESTED):
        with answering(response) as (port, _), pytest.raises(ValueError, match="a status on /health"):
            status_of(port, 20)


def test_silent_engine_is_a_timeout() -> None:
    with answering() as (port, _), pytest.raises(ConnectionResetError, match="without an answer"):
        status_of(port, 20)
    with answering(b"HTTP/1.1 200", hang=True) as (port, _), pytest.raises(TimeoutError):
        status_of(port, 0.2)


def test_engine_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    version = b'{"ApiVersion": "1.41"}'
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(version), version)) as (port, _):
        engine = DockerEngine(EngineAddress(f"tcp://127.0.0.1:{port}"))
        assert engine.client().api_version == "1.41"


# ---- providers that a client is given


def test_response_that_is_cut_is_no_response(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as fake, pytest.raises(EngineUnavailableError, match="IncompleteRead"):
        DockerEngine(EngineAddress(fake.host)).archive("cut", "/app")


def test_given_provider_gets_the_image_and_its_options() -> None:
    provider = Mock(spec=["start_container", "wait_for_ready", "stop_container"])
    provider.start_container.return_value = "http://127.0.0.1:9"
    provider.wait_for_ready.side_effect = TimeoutError("never")
    client = GenericEnvClient.from_docker_image(
        "some:image", provider=provider, message_timeout_s=1, memory="1g", env_vars={"A": "b"}
    )
    with pytest.raises(TimeoutError, match="never"):
        client.reset()
    assert provider.mock_calls[:3] == [
        call.start_container("some:image", memory="1g", env_vars={"A": "b"}),
        call.wait_for_ready("http://127.0.0.1:9"),
        call.stop_container(),
    ]


def test_image_of_a_space_is_named_after_it() -> None:
    client = GenericEnvClient.from_env("some-org/echo_env.v2", memory="1g")
    assert client._client._session.servers.provider.image == "registry.hf.space/some-org-echo-env-v2:latest"
    with pytest.raises(ConfigurationError, match="'owner/name', got 'echo'"):
        GenericEnvClient.from_env("echo")
    with pytest.raises(ConfigurationError, match="git clone https://huggingface"):
        GenericEnvClient.from_env("a/b", use_docker=False)


def test_unknown_options_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="did you mean memory"):
        GenericEnvClient.from_docker_image("some:image", memmory="1g")
    with pytest.raises(ConfigurationError, match="without wait_for_ready"):
        GenericEnvClient.from_docker_image("some:image", provider=type("P", (), {"start_container": print})())
