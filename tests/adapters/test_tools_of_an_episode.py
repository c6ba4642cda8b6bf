"""Tools belong to an episode: a reset may choose them."""

import inspect

import pytest
from kits import app as kits
from serve_process import serve
from serving import serving

from openenv_core.adapters.episode import TextEpisode
from openenv_core.adapters.trl import TRLEnvironments, environment_reward
from openenv_core.errors import ConfigurationError


async def test_each_episode_has_the_tools_of_its_reset() -> None:
    async with serving(kits) as address:
        episode = TextEpisode(f"http://{address}")
        for kit in (["cut"], ["drive", "weld"], ["cut", "drive"]):
            await episode.reset(kit=kit)
            assert [tool["function"]["name"] for tool in episode.tools] == kit
            assert [name for name in ("cut", "drive", "weld") if f'"{name}"' in episode.instructions] == kit
        await episode.reset(kit=["cut"])
        assert "no drive in the kit" in await episode.call("drive", {})
        assert not episode.over
        await episode.reset(kit=[])
        assert episode.reward is None  # no policy could have played it
        await episode.close()


def test_trl_tells_the_policy_of_missing_tools_and_refuses_others() -> None:
    kits = [["cut"], ["cut", "drive"], ["weld"]]
    with (
        serve(app="kits:app") as server,
        TRLEnvironments(f"http://{server.address}", episodes=[{"kit": kit} for kit in kits]) as environments,
    ):
        environment = environments.environment_factory()  # type: ignore[operator]
        functions = dict(inspect.getmembers(type(environment), inspect.isfunction))  # as TRL lists tools
        assert {name for name in functions if not name.startswith("_")} == {"reset", "cut", "drive"}
        prompt = environment.reset(kit=["cut"])
        assert '"cut"' in prompt
        assert "drive" not in prompt
        assert "no drive in the kit" in environment.drive()
        assert environment_reward([environment]) == [0]
        assert environment.cut(length=2) == "cut at 2"
        assert environment_reward([environment]) == [1]
        assert "tools" not in environment.reset(kit=["cut", "drive"])
        with pytest.raises(ConfigurationError, match=r"cannot offer the tools weld .* rollout_func"):
            environment.reset(kit=["weld"])
