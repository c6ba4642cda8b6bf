"""TorchTitan's RL (TitanRL): any served environment as a `MessageEnv`, and a Rollouter that drops what failed.

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

from openenv_core.adapters.episode import TextEpisode
from openenv_core.errors import EnvironmentFailureError

REWARD: Final = "episode"
"""The key of `env_rewards` under which the last step has the whole episode's reward."""

_FAILED: Final = frozenset({"error", "error_timeout", "error_abort"})


class ServedMessageEnv(MessageEnv):  # type: ignore[misc]  # the package has no types
    """One episode of a served environment: the policy answers in text, with one call of a tool each turn.

    Each step has in `env_rewards["episode"]` what the episode is worth so far, so that a reward function takes the last
    one. Where the environment fails, or nobody can say what the episode is worth, `step` raises: the rollout's status
    becomes ERROR, and `DropFailedRollouts` takes it out of its group.

    Args:
        config: Where the server is, and how it is played.
        env_input: The data set's sample: a mapping whose `prompt` is what the policy is told first, and whose `reset`
            has the options of the reset, such as `seed`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MessageEnv.Config):  # type: ignore[misc]
        """As `TextEpisode` has them."""

        base_url: str
        token: str | None = None
        reset_timeout_s: float = 60.0
        step_timeout_s: float = 60.0
        unfinished_reward: float | None = None

    def __init__(self, config: Config, *, env_input: Mapping[str, Any]) -> None:
        self._episode = TextEpisode(
            config.base_url,
            token=config.token,
            reset_timeout_s=config.reset_timeout_s,
            step_timeout_s=config.step_timeout_s,
            unfinished_reward=config.unfinished_reward,
        )
        self._prompt = str(env_input.get("prompt") or "")
        self._reset_options = dict(env_input.get("reset") or {})

    async def init(self) -> MessageEnvInitOutput:
        """Start the episode.

        Raises:
            ClientError: It could not be started.
        """
        observation = await self._episode.reset(**self._reset_options)
        parts = (self._prompt, self._episode.instructions, observation)
        text = "\n\n".join(section for section in parts if section)
        return MessageEnvInitOutput(init_prompt_messages=[{"role": "user", "content": text}])

    async def step(self, completion_message: Mapping[str, Any]) -> MessageEnvStepOutput:
        """Carry out the call in a policy's answer.

        Raises:
            EnvironmentFailureError: Something beside the policy failed, or nobody can say what the episode is worth.
        """
        reply = await self._episode.answer(str(completion_message.get("content") or ""))
        reward = self._episode.reward
        if reward is None:
            reason = self._episode.failure or "it was not scored"
            raise EnvironmentFailureError(f"the episode has no reward: {reason}")
        return MessageEnvStepOutput(
            env_messages=[{"role": "user", "content": reply}],
            done=self._episode.done,
            env_rewards={REWARD: reward},
        )

    async def close(self) -> None:
        """End the session."""
        await self._episode.close()


class DropFailedRollouts:
    """Put before a `Rollouter` among the bases: what failed beside the policy leaves its group.

    TitanRL scores rollouts of status ERROR like any other. Here those are dropped, and the advantages of the others are
    worked out without them. A group of which nothing is left is one that TitanRL drops by itself.
    """

    async def run_group_rollouts(self, **options: Any) -> Any:
        """Roll out a group, as the Rollouter does, and return what did not fail."""
        group = await super().run_group_rollouts(**options)  # type: ignore[misc]
        sound = [rollout for rollout in group.rollouts if rollout.status.value not in _FAILED]
        if len(sound) < len(group.rollouts):
            group.rollouts = sound
            advantages = self.advantage_estimator(group) if sound else []  # type: ignore[attr-defined]
            for rollout, advantage in zip(sound, advantages, strict=True):
                rollout.advantage = advantage
        return group
