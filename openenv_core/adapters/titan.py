"""Adapter for TorchTitan's RL (TitanRL): any served environment as a `MessageEnv`; failed rollouts are dropped.

class BlackjackRollouter(DropFailedRollouts, Rollouter):
    @dataclass(kw_only=True, slots=True)
    class Config(Rollouter.Config):
        message_env: MessageEnv.Config = field(
            default_factory=lambda: ServedMessageEnv.Config(base_url="http://localhost:8000", unfinished_reward=-1.0)
        )
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchtitan.experiments.rl.environment.message import (
    MessageEnv,
    MessageEnvInitOutput,
    MessageEnvStepOutput,
)

from openenv_core.adapters.episode import EpisodeSettings, TextEpisode

REWARD: Final = "episode"
"""Key in `env_rewards` of the episode's reward so far; in the last step that of the whole episode."""

_FAILED_STATUSES: Final = frozenset({"error", "error_timeout", "error_abort"})


class ServedMessageEnv(MessageEnv):  # type: ignore[misc]  # the package has no types
    """One episode of a served environment: the policy answers in text, with one tool call each turn.

    Each step has the episode's reward so far in `env_rewards["episode"]`, of which a reward function takes the last. If
    the environment fails, or does not score the episode, `step` raises: the rollout's status becomes ERROR, and
    `DropFailedRollouts` removes it from its group.

    Args:
        config: The server, and settings of the episode.
        env_input: The data set's sample: a mapping with the policy's `prompt`, and with `reset`, the options of the
            reset, such as `seed`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MessageEnv.Config):  # type: ignore[misc]
        """Arguments of `TextEpisode`."""

        base_url: str
        token: str | None = None
        reset_timeout_s: float = 60.0
        step_timeout_s: float = 60.0
        unfinished_reward: float | None = None

    def __init__(self, config: Config, *, env_input: Mapping[str, Any]) -> None:
        settings: Any = {name: getattr(config, name) for name in EpisodeSettings.__annotations__}
        self._episode = TextEpisode(config.base_url, **settings)
        self._prompt = str(env_input.get("prompt") or "")
        self._reset_options = dict(env_input.get("reset") or {})

    async def init(self) -> MessageEnvInitOutput:
        """Start the episode and return its first message.

        Raises:
            ClientError: The episode could not be started.
        """
        observation = await self._episode.reset(**self._reset_options)
        parts = (self._prompt, self._episode.instructions, observation)
        text = "\n\n".join(section for section in parts if section)
        return MessageEnvInitOutput(init_prompt_messages=[{"role": "user", "content": text}])

    async def step(self, completion_message: Mapping[str, Any]) -> MessageEnvStepOutput:
        """Execute the tool call in a policy's answer.

        Raises:
            EnvironmentFailureError: The environment failed, or did not score the episode.
        """
        reply = await self._episode.answer(str(completion_message.get("content") or ""))
        reward = self._episode.require_reward()
        return MessageEnvStepOutput(
            env_messages=[{"role": "user", "content": reply}],
            done=self._episode.done,
            env_rewards={REWARD: reward},
        )

    async def close(self) -> None:
        """End the session."""
        await self._episode.close()


class DropFailedRollouts:
    """Mixin, before a `Rollouter` among the bases, that drops rollouts which failed for reasons other than the policy.

    TitanRL scores rollouts of status ERROR like any other. Here they are dropped, and the advantages of the others are
    computed without them. TitanRL itself drops a group that becomes empty.
    """

    async def run_group_rollouts(self, **options: Any) -> Any:
        """Roll out a group as the Rollouter does, and return it without failed rollouts."""
        group = await super().run_group_rollouts(**options)  # type: ignore[misc]
        valid = [rollout for rollout in group.rollouts if rollout.status.value not in _FAILED_STATUSES]
        if len(valid) < len(group.rollouts):
            group.rollouts = valid
            advantages = self.advantage_estimator(group) if valid else []  # type: ignore[attr-defined]
            for rollout, advantage in zip(valid, advantages, strict=True):
                rollout.advantage = advantage
        return group
