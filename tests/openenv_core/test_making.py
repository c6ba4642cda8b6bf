"""`make`, and the released factories that do the same."""

import re
from pathlib import Path
from typing import Any

import pytest
from serving import serving

from envs.blackjack_env import BlackjackAction, BlackjackEnv, BlackjackObservation
from envs.blackjack_env.server.environment import BlackjackEnvironment
from openenv_core import ConfigurationError, GenericAction, GenericEnvClient, make
from openenv_core.compat.auto import AutoAction, AutoEnv
from openenv_core.tools import CallToolAction
from servers import create_app


@pytest.mark.slow
def test_make_returns_clients_for_names_and_urls() -> None:
    with make("blackjack") as env:
        assert isinstance(env.async_client, BlackjackEnv)
        assert not env.reset(seed=1).done
        with make(env.base_url) as other:
            assert isinstance(other.async_client, GenericEnvClient)
            assert "player_total" in other.reset(seed=1).observation
        with AutoEnv.from_env("blackjack-env", base_url=env.base_url) as auto:
            assert isinstance(auto, BlackjackEnv)
            result: Any = auto.reset(seed=2)  # where no loop runs, it is the result
            assert not result.done
            result = auto.step(AutoAction.from_env("blackjack")(action="stand"))
            assert result.done
            assert AutoAction.from_env("blackjack") is BlackjackAction


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"there are: .*blackjack"):
        make("no-such-game")
    with pytest.raises(TypeError, match="from_env"):
        AutoEnv()
    space = AutoEnv.from_env("somebody/my.game")
    assert isinstance(space, GenericEnvClient)
    assert space.base_url == "https://somebody-my-game.hf.space"
    space.close()


def test_released_factories_take_released_arguments_by_position() -> None:
    client = AutoEnv.from_env("blackjack", None, None, None, 5.0, {"LEVEL": "1"})
    assert isinstance(client, BlackjackEnv)
    client.close()  # its server was to start at the first use
    assert AutoAction.from_env("blackjack", True) is GenericAction
    assert AutoAction.from_hub(env_name="blackjack-env") is BlackjackAction
    assert AutoAction.from_env("shop") is CallToolAction


async def test_released_factory_gives_an_async_client_where_a_loop_runs() -> None:
    async with serving(create_app(BlackjackEnvironment, BlackjackAction, BlackjackObservation)) as address:
        env = AutoEnv.from_env("blackjack", base_url=f"http://{address}")
        assert isinstance(env, BlackjackEnv)
        async with env:
            assert not (await env.reset(seed=1)).done
            assert (await env.step(AutoAction.from_env("blackjack")(action="stand"))).done


def test_released_factories_describe_environments(capsys: pytest.CaptureFixture[str]) -> None:
    info = AutoEnv.get_env_info("blackjack-env")
    assert info["env_key"] == "blackjack"
    assert info["name"] == "blackjack_env"
    assert info["package"] == "ropewalk"
    assert info["description"].startswith("One hand of BlackJack")
    assert (info["env_class"], info["action_class"]) == ("BlackjackEnv", "BlackjackAction")
    assert (info["observation_class"], info["module"]) == (
        "BlackjackObservation",
        "envs.blackjack_env.client",
    )
    assert (info["default_image"], info["spec_version"]) == ("blackjack-env:latest", 1)
    action = AutoAction.get_action_info("blackjack")
    assert (action["env_name"], action["action_class"]) == ("blackjack_env", "BlackjackAction")
    for ask in (AutoEnv.get_env_info, AutoAction.get_action_info):
        with pytest.raises(ValueError, match="no-such-game"):
            ask("no-such-game")
    AutoEnv.list_environments()
    assert re.search(r"^  blackjack +One hand of BlackJack .*ropewalk", capsys.readouterr().out, re.M)


def test_broken_environment_is_listed_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_env" / "server").mkdir(parents=True)
    (tmp_path / "broken_env" / "__init__.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    AutoAction.list_actions()
    printed = capsys.readouterr().out
    assert re.search("^  broken +cannot be imported: .*no_such_package", printed, re.M)
    assert re.search(r"^  blackjack +BlackjackAction", printed, re.M)
    assert re.search(r"^  shop +CallToolAction", printed, re.M)


def test_a_fleet_has_an_engine_and_a_target() -> None:
    with pytest.raises(ConfigurationError, match="servers=N with fleet=ENGINE"):
        make("blackjack", servers=2)
    with pytest.raises(ConfigurationError, match="servers=N with fleet=ENGINE"):
        make(["http://127.0.0.1:1"], fleet="ray")
    with pytest.raises(ConfigurationError, match="on ray, docker, kubernetes, agent-sandbox, got 'nomad'"):
        make("blackjack", fleet="nomad")
    with pytest.raises(ConfigurationError, match="did you mean memory"):
        make("image:latest", fleet="docker", memoy="1g")
