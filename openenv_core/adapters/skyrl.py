"""Adapter for SkyRL-Gym: any served environment as a text environment.

skyrl_gym.register(id="ropewalk", entry_point="openenv_core.adapters.skyrl:ServedTextEnv")
env = skyrl_gym.make("ropewalk", env_config={"base_url": "http://localhost:8000"}, extras={"reset": {"seed": 1}})
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from openenv_core.adapters.episode import TextEpisode
from openenv_core.errors import ClientError, EnvironmentFailureError, OpenEnvError
from openenv_core.loop_thread import shared_loop

MAX_TURNS: Final = 16

WINDOW: Final = 256
"""Last episodes of the process over which `failed_share` is taken."""

FAILED: Final = "failed"
"""Key of a turn's metadata that says why its episode does not count."""


class ServedTextEnv(BaseTextEnv):  # type: ignore[misc]  # the package has no types
    """One episode of a served environment: the policy answers in text, with one tool call each turn.

    The reward comes with the last turn. SkyRL cannot leave a sample out, so an environment that fails raises, which
    ends SkyRL's batch: such a failure is never a reward. With `failed_share` the episode ends instead, with a reward of
    0 and the mark `FAILED` in its metadata, unless more than that share of the last `WINDOW` episodes have failed.

    Args:
        env_config: `base_url`; optionally `max_turns` (default: that of `extras`, else 16), `failed_share` (0) and, as
            in `TextEpisode`, `token`, `reset_timeout_s`, `step_timeout_s` and `unfinished_reward`.
        extras: The data set's row; its `reset` has the options of the reset, such as `seed`. SkyRL adds `max_turns`,
            its `generator.max_turns`.
    """

    _outcomes: ClassVar[deque[bool]] = deque(maxlen=WINDOW)  # of this process's episodes: whether they failed

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        options, extras = dict(env_config), extras or {}
        self.max_turns = options.pop("max_turns", extras.get("max_turns", MAX_TURNS))
        self._failed_share = float(options.pop("failed_share", 0.0))
        self._failure: str | None = None
        self._episode = TextEpisode(options.pop("base_url"), **options)
        self._reset_options = dict(extras.get("reset") or {})

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Start the episode; return the prompt with a description of the tools and the first observation.

        Raises:
            ClientError: The episode could not be started, and `failed_share` does not allow for it.
        """
        self.turns, self._failure = 0, None
        try:
            observation = shared_loop().run(self._episode.reset, **self._reset_options)
        except ClientError as error:
            self._record(error)
            return prompt, {}
        return [*prompt, _user(f"{self._episode.instructions}\n\n{observation}")], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the tool call in a policy's answer.

        Raises:
            EnvironmentFailureError: The environment failed, or did not score the episode, and `failed_share` does not
                allow for it.
        """
        self.turns += 1
        if self._failure is None:
            reply = shared_loop().run(self._episode.answer, action)
            over = self._episode.done or self.turns >= self.max_turns
            try:
                reward = self._episode.require_reward()
            except EnvironmentFailureError as error:
                self._record(error)
            else:
                if over:
                    self._outcomes.append(False)
                return BaseTextEnvStepOutput(
                    observations=[_user(reply)], reward=reward if over else 0.0, done=over, metadata={}
                )
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={FAILED: self._failure})

    def close(self) -> None:
        """End the session."""
        shared_loop().run(self._episode.close)

    def _record(self, error: OpenEnvError) -> None:
        """Note that the episode has failed; raise the error if too many have."""
        self._outcomes.append(True)
        if self._outcomes.count(True) > self._failed_share * WINDOW:
            raise error
        self._failure = str(error)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
