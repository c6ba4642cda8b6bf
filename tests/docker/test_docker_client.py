"""A client that brings its container, and the released package's provider shapes."""

import asyncio
import importlib
from typing import Any

import pytest
from free_ports import free_port

from openenv_core import ConfigurationError, ContainerOptions, GenericEnvClient, compat
from openenv_core.providers.docker import Engine

pytestmark = pytest.mark.timeout(600)  # the first waits for the image

STEP = {"what": "identity"}


@pytest.mark.docker
def test_a_client_of_an_image_sync_and_async(engine: Engine, hostile_image: str) -> None:
    labels = {"ropewalk-test": "client"}
    with GenericEnvClient.from_docker_image(hostile_image, labels=labels, message_timeout_s=30) as client:
        client.reset()
        assert client.step(STEP).observation["said"] == "0:0"
        assert len(engine.labelled("ropewalk-test=client")) == 1
    assert engine.labelled("ropewalk-test=client") == []

    async def play() -> str:
        options = ContainerOptions(labels=labels, user="7:7")
        async with await GenericEnvClient.from_docker_image(hostile_image, options=options) as client:
            await client.reset()
            return str((await client.step(STEP)).observation["said"])

    assert asyncio.run(play()) == "7:7"
    assert engine.labelled("ropewalk-test=client") == []


@pytest.mark.soak
@pytest.mark.docker
def test_a_server_that_wants_a_token(hostile_image: str) -> None:
    token = "a-token-of-many-characters"
    variables = {"ROPEWALK_TOKENS": f"another-of-many-characters,{token}"}
    with GenericEnvClient.from_docker_image(hostile_image, env_vars=variables, token=token) as client:
        client.reset()
        assert client.step(STEP).observation["said"] == "0:0"


@pytest.mark.soak
@pytest.mark.docker
def test_the_released_provider_is_ours(engine: Engine, hostile_image: str) -> None:
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
            with pytest.raises(ConfigurationError, match="a second start_container"):
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
        compat.uninstall()


class Recorder:
    """A provider of the released shape that starts nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_container(self, image: str, **options: Any) -> str:
        self.calls.append((image, options))
        return "http://127.0.0.1:9"

    def wait_for_ready(self, base_url: str) -> None:
        self.calls.append(base_url)
        raise TimeoutError("never")

    def stop_container(self) -> None:
        self.calls.append("stop")


def test_a_given_provider_is_told_the_image_and_its_options() -> None:
    recorder = Recorder()
    client = GenericEnvClient.from_docker_image(
        "some:image", provider=recorder, message_timeout_s=1, memory="1g", env_vars={"A": "b"}
    )
    with pytest.raises(TimeoutError, match="never"):
        client.reset()
    assert recorder.calls[:3] == [
        ("some:image", {"memory": "1g", "env_vars": {"A": "b"}}),
        "http://127.0.0.1:9",
        "stop",
    ]


def test_options_that_are_nobodys_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="did you mean memory"):
        GenericEnvClient.from_docker_image("some:image", memmory="1g")
    with pytest.raises(ConfigurationError, match="without wait_for_ready"):
        GenericEnvClient.from_docker_image("some:image", provider=type("P", (), {"start_container": print})())
