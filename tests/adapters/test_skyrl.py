"""SkyRL-Gym's own release plays served environments; its `make` is the one that its trainer calls."""

import json
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counter import Add, Count, Counter, Failing
from serve_process import serve
from serving import served

from openenv_core.errors import EnvironmentFailureError
from servers import create_app

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def registered_by_none() -> Iterator[None]:
    yield
    from skyrl_gym.envs.registration import deregister

    deregister("ropewalk")


def test_twenty_hands_are_played_and_their_rewards_are_the_servers() -> None:
    import skyrl_gym

    skyrl_gym.register(id="ropewalk", entry_point="openenv_core.adapters.skyrl:ServedTextEnv")
    with serve(app="envs.blackjack_env.server.app:app") as server:
        config = {"base_url": f"http://{server.address}", "unfinished_reward": -1.0}
        for seed in range(20):
            env: Any = skyrl_gym.make("ropewalk", env_config=config, extras={"reset": {"seed": seed}})
            prompt, _ = env.init([{"role": "system", "content": "Play."}])
            assert "You hold" in prompt[-1]["content"]
            first = env.step("I am not sure.")
            assert not first["done"]
            assert first["observations"][0]["content"].startswith("error: ")
            last = env.step(_call(action="stand"))
            assert last["done"]
            # "You win: +1." is what the server says of the hand's return.
            assert (
                float(last["observations"][0]["content"].rpartition(" ")[2].rstrip('."}')) == last["reward"]
            )
            env.close()
        for limited in ({"env_config": {**config, "max_turns": 1}}, {"extras": {"max_turns": 1}}):
            hesitant: Any = skyrl_gym.make("ropewalk", **{"env_config": config, **limited})
            hesitant.init([])
            assert hesitant.step("I am not sure.") == {**first, "reward": -1.0, "done": True}
            hesitant.close()


def test_failed_episode_ends_with_a_mark_until_too_many_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    import skyrl_gym

    from openenv_core.adapters import skyrl

    skyrl_gym.register(id="ropewalk", entry_point="openenv_core.adapters.skyrl:ServedTextEnv")
    monkeypatch.setattr(skyrl, "WINDOW", 4)
    monkeypatch.setattr(skyrl.ServedTextEnv, "_outcomes", deque(maxlen=4))

    def play(url: str, **config: Any) -> Any:
        options: Any = {"env_config": {"base_url": url, **config}, "extras": {"reset": {"seed": 0}}}
        env: Any = skyrl_gym.make("ropewalk", **options)
        try:
            env.init([])
            return env.step(_call(amount=10))
        finally:
            env.close()

    with served(create_app(Failing, Add, Count)) as first, served(create_app(Counter, Add, Count)) as other:
        failing, sound = f"http://{first}", f"http://{other}"
        with pytest.raises(EnvironmentFailureError, match="the disk is full"):
            play(failing)
        for _ in range(4):
            assert play(sound)["reward"] == 1
        marked = play(failing, failed_share=0.5)
        assert (marked["reward"], marked["done"], marked["observations"]) == (0.0, True, [])
        assert "the disk is full" in marked["metadata"][skyrl.FAILED]
        unreached = play("http://127.0.0.1:9", reset_timeout_s=0.1, failed_share=0.5)
        assert unreached["done"]
        assert "127.0.0.1:9" in unreached["metadata"][skyrl.FAILED]
        with pytest.raises(EnvironmentFailureError, match="the disk is full"):
            play(failing, failed_share=0.5)
        assert play(sound, failed_share=0.5)["metadata"] == {}


def test_the_page_example_plays() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    block = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[1]
    with serve(app="envs.blackjack_env.server.app:app") as server:
        shown: dict[str, Any] = {}
        exec(block.replace("localhost:8000", server.address), shown)
    assert shown["output"]["done"]
    assert shown["output"]["reward"] in (-1, 0, 1)


def _call(**arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': arguments})}</tool_call>"
