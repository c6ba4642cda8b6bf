"""One trajectory: the policy plays one episode through one session."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from openenv_core import StepResult
from rl_bridge.errors import EpisodeUnscored
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.outcomes import require_play
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.seeds import sampling_seed
from rl_bridge.rollout.task import Task
from rl_bridge.tokens.chat import Message
from rl_bridge.types import Ending, Trajectory, Turn


class Session(Protocol):
    """One environment: an `EnvClient`, or a leased session."""

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode."""

    async def step(self, action: Any, /) -> StepResult[Any]:
        """Take a step."""


Judge: TypeAlias = Callable[[Sequence[Message], str, Any], Awaitable[float | None]]
"""Told the chat that an episode began with, the policy's answers, a line each, and the task's target."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeSettings:
    """What an episode is played by.

    Attributes:
        temperature: Of the sampling; 0 plays greedily.
        num_turns: Exchanges at most.
        illegal_reward: What an answer that is no legal action earns; it ends the episode.
        reset_options: Sent with the reset, beside the seed.
    """

    temperature: float
    num_turns: int
    illegal_reward: float
    reset_options: Mapping[str, Any] = field(default_factory=dict)


async def play_episode(
    client: Session,
    policy: ChatPolicy,
    task: Task,
    *,
    seed: int,
    settings: EpisodeSettings,
    sampling_key: tuple[int, int, int] | None = None,
    judge: Judge | None = None,
) -> Trajectory | None:
    """Play one episode from its seed to its end.

    Args:
        client: A session of the environment.
        policy: Who plays.
        task: What ties the two together.
        seed: The environment's.
        settings: How it is played.
        sampling_key: The run's seed, the group and the sibling, where every completion is to be sampled with a seed
            of its own; None where the engine's generator goes on as it pleases.
        judge: Says what the answers earn beside what the environment gives; None where nothing else counts.

    Returns:
        The trajectory; None where the episode was over before the policy could act.

    Raises:
        openenv_core.ClientError: The session failed; the episode is lost, through no fault of the policy's.
        rl_bridge.errors.EpisodeLost: The environment says that its infrastructure failed; likewise.
        rl_bridge.errors.EpisodeUnscored: It, or the judge, says that nobody knows how well the episode was played.
        rl_bridge.errors.GeneratorError: The engine failed.
    """
    turns: list[Turn] = []
    texts: list[str] = []
    with span("reset", waits_for="environment"):
        result = await client.reset(seed=seed, **settings.reset_options)
    require_play(result)
    total = float(result.reward or 0.0)
    first = result.observation
    ending = Ending.COMPLETED
    while not result.done:
        if len(turns) == settings.num_turns:
            ending = Ending.TRUNCATED_TURNS
            break
        with span("prompt"):
            prompt = policy.prompt(task.messages(result.observation))
        if prompt is None:
            ending = Ending.TRUNCATED_LENGTH
            break
        with span("answer", waits_for="policy"):
            turn, text = await policy.answer(
                prompt,
                temperature=settings.temperature,
                seed=None if sampling_key is None else sampling_seed(*sampling_key, len(turns)),
            )
        turns.append(turn)
        texts.append(text)
        action = task.parse(text)
        if action is None:
            ending = Ending.ILLEGAL
            total += settings.illegal_reward
            break
        with span("step", waits_for="environment"):
            result = await client.step(action)
        require_play(result)
        total += float(result.reward or 0.0)
    if not turns:
        return None
    if judge is not None:
        with span("judge", waits_for="reward"):
            total += await _judged(judge, task, first, texts)
    return Trajectory(seed=seed, turns=turns, ending=ending, reward=total)


async def _judged(judge: Judge, task: Task, first: Any, texts: Sequence[str]) -> float:
    earned = await judge(task.messages(first), "\n".join(texts), task.target(first))
    if earned is None:
        raise EpisodeUnscored("the reward function gave no reward")
    return earned
