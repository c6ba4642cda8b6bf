"""`make`, and the released factories that do the same."""

import pytest

from envs.blackjack_env import BlackjackAction, BlackjackEnv
from openenv_core import ConfigurationError, GenericEnvClient, make
from openenv_core.compat.auto import AutoAction, AutoEnv


@pytest.mark.slow
def test_make_returns_clients_for_names_and_urls() -> None:
    with make("blackjack") as env:
        assert isinstance(env.async_client, BlackjackEnv)
        assert not env.reset(seed=1).done
        with make(env.base_url) as other:
            assert isinstance(other.async_client, GenericEnvClient)
            assert "player_total" in other.reset(seed=1).observation
        with AutoEnv.from_env("blackjack-env", base_url=env.base_url) as auto:
            auto.reset(seed=2)
            assert auto.step(AutoAction.from_env("blackjack")(action="stand")).observation is not None
            assert AutoAction.from_env("blackjack") is BlackjackAction


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`ropewalk list`"):
        make("no-such-game")
    with pytest.raises(TypeError, match="from_env"):
        AutoEnv()
    space = AutoEnv.from_env("somebody/my.game")
    assert space.base_url == "https://somebody-my-game.hf.space"
    space.close()
