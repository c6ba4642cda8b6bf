"""A fleet of containers on a real engine: a rolling update under load, scale-in, restarts."""

import socket
import threading
from pathlib import Path

import pytest
from owned_containers import eventually

from envs.blackjack_env import BlackjackAction, BlackjackEnv
from openenv_core import make
from openenv_core.cli.fleet import COMMAND
from openenv_core.cli.main import run
from openenv_core.providers import DockerFleet
from openenv_core.providers.docker import DockerEngine
from openenv_core.providers.docker import fleet as docker_fleet
from openenv_core.providers.docker.fleet import FLEET

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


def play(env: "BlackjackEnv", seed: int) -> list[object]:
    """Play an episode by a rule; return all that was observed."""
    result = env.reset(seed=seed)
    seen = [result.observation]
    while not result.done:
        result = env.step(BlackjackAction(action="hit" if result.observation.player_total < 17 else "stand"))
        seen.append(result.observation)
    return seen


def test_clients_of_a_fleet_notice_nothing_of_an_update(engine: DockerEngine, blackjack: str) -> None:
    with make(blackjack, client=BlackjackEnv, fleet="docker", servers=2, memory="256m") as env:
        fleet = env.async_client._session.servers.provider
        assert isinstance(fleet, DockerFleet)
        envs = [env, *(env.new_session() for _ in range(7))]
        assert fleet.load().in_use == 8
        expected = [play(each, seed) for seed, each in enumerate(envs)]
        containers = {each["Id"] for each in engine.list_labelled(f"{FLEET}={fleet.name}")}
        urls = fleet.urls()
        rolling = threading.Thread(target=fleet.roll)
        rolling.start()
        while rolling.is_alive():
            assert [play(each, seed) for seed, each in enumerate(envs)] == expected
        assert fleet.urls() == urls
        assert not containers & {each["Id"] for each in engine.list_labelled(f"{FLEET}={fleet.name}")}
        # One that dies is started again by the engine, at its URL.
        engine.execute(f"{fleet.name}-0", ["sh", "-c", "kill -9 -1"], timeout_s=60, most=1000)
        assert [play(each, seed) for seed, each in enumerate(envs)] == expected
        fleet.wait_ready(2)
        assert fleet.urls() == urls
    assert engine.list_labelled(f"{FLEET}={fleet.name}") == []


def test_a_port_that_was_taken_meanwhile_is_replaced(
    engine: DockerEngine, blackjack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]
        free_port = docker_fleet._free_port
        monkeypatch.setattr(docker_fleet, "_free_port", lambda: ports.pop() if ports else free_port())
        with DockerFleet(blackjack, 1, memory="256m") as fleet:
            assert len(fleet.urls()) == 1
            assert fleet.urls()[0] != f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert ports == []


@pytest.mark.soak
def test_the_command_scales_a_fleet_that_outlives_it(
    engine: DockerEngine, blackjack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file = tmp_path / "token"
    name = "test-games"
    assert (
        run(COMMAND, ["up", "docker", name, blackjack, "--servers", "2", "--token-file", str(token_file)])
        == 0
    )
    try:
        assert run(COMMAND, ["up", "docker", name, blackjack, "--token-file", str(token_file)]) == 2
        fleet = DockerFleet.find(name)
        assert fleet.token == token_file.read_text().strip()
        last = fleet.urls()[1]
        with BlackjackEnv(last, token=fleet.token).sync() as env:
            env.reset(seed=1)
            scaling = threading.Thread(target=fleet.scale, args=[1])
            scaling.start()
            with BlackjackEnv(fleet.urls(), token=fleet.token).sync() as another:
                eventually(lambda: another.base_url == fleet.urls()[0])
            assert env.step(BlackjackAction(action="stand")).done  # the server waits for it
            assert scaling.is_alive()
        scaling.join(60)
        assert len(fleet.servers()) == 1
        fleet.scale(2)
        assert len(fleet.urls()) == 2
    finally:
        assert run(COMMAND, ["down", "docker", name]) == 0
    assert engine.list_labelled(f"{FLEET}={name}") == []
