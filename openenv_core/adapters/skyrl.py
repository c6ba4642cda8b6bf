"""Adapter for SkyRL-Gym: any served environment as a text environment.

skyrl_gym.register(id="ropewalk", entry_point="openenv_core.adapters.skyrl:ServedTextEnv")
env = skyrl_gym.make("ropewalk", env_config={"base_url": "http://localhost:8000"}, extras={"reset": {"seed": 1}})
"""

from collections.abc import Mapping
from typing import Any, Final

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from openenv_core.adapters.episode import TextEpisode
from openenv_core.loop_thread import shared_loop

MAX_TURNS: Final = 16


class ServedTextEnv(BaseTextEnv):  # type: ignore[misc]  # the package has no types
    """One episode of a served environment: the policy answers in text, with one tool call each turn.

    The reward comes with the last turn. SkyRL cannot leave a sample out, so `step` raises if the environment fails:
    such a failure is never a reward.

    Args:
        env_config: `base_url`; optionally `max_turns` (default: that of `extras`, else 16) and, as in `TextEpisode`,
            `token`, `reset_timeout_s`, `step_timeout_s` and `unfinished_reward`.
        extras: The data set's row; its `reset` has the options of the reset, such as `seed`. SkyRL adds `max_turns`,
            its `generator.max_turns`.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        options, extras = dict(env_config), extras or {}
        self.max_turns = options.pop("max_turns", extras.get("max_turns", MAX_TURNS))
        self._episode = TextEpisode(options.pop("base_url"), **options)
        self._reset_options = dict(extras.get("reset") or {})

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Start the episode; return the prompt with a description of the tools and the first observation.

        Raises:
            ClientError: The episode could not be started.
        """
        observation = shared_loop().run(self._episode.reset, **self._reset_options)
        self.turns = 0
        return [*prompt, _user(f"{self._episode.instructions}\n\n{observation}")], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the tool call in a policy's answer.

        Raises:
            EnvironmentFailureError: The environment failed, or did not score the episode.
        """
        reply = shared_loop().run(self._episode.answer, action)
        self.turns += 1
        over = self._episode.done or self.turns >= self.max_turns
        reward = self._episode.require_reward()
        return BaseTextEnvStepOutput(
            observations=[_user(reply)], reward=reward if over else 0.0, done=over, metadata={}
        )

    def close(self) -> None:
        """End the session."""
        shared_loop().run(self._episode.close)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
