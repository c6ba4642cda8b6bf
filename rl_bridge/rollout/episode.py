"""One trajectory: the policy plays one episode through one session."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydantic_core import PydanticSerializationError

from openenv_core import StepResult
from openenv_core.backoff import exponential_pause_s
from openenv_core.errors import OpenEnvError, ValidationFailedError
from openenv_core.outcomes import SCORES
from openenv_core.tracebacks import format_traceback
from openenv_core.tracing import traced
from rl_bridge.errors import (
    BridgeError,
    EpisodeLostError,
    EpisodeUnscoredError,
    NoReplicaError,
    ReplicaLostError,
    RolloutError,
)
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.assignment import EpisodeSettings, sampling_seed
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Dialogue, Session, Task
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Ending, Trajectory, Turn

REASON_CHARS: Final = 1000
"""The most characters kept of a failure's message: it goes into logs and every checkpoint."""


def shorten_reason(reason: str) -> str:
    """Truncate a reason and replace lone surrogates, with which no checkpoint could be written."""
    text = reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]} …"
    return text.encode(errors="replace").decode()


def require_scored(result: StepResult[Any]) -> None:
    """Raise EpisodeLostError if infrastructure failed, which makes the episode's rewards meaningless.

    Raises EpisodeUnscoredError if the environment could not score the episode.
    """
    outcome = result.outcome
    if outcome.infrastructure_error is not None:
        raise EpisodeLostError(outcome.infrastructure_error)
    if outcome.unscored is not None:
        raise EpisodeUnscoredError(outcome.unscored)


Judge: TypeAlias = Callable[[Sequence[ChatMessage], str, Any], Awaitable[float | None]]
"""Scores an episode from its first chat, the policy's answers joined by newlines, and the task's target."""

ILL_FORMED: Final = (Ending.ILLEGAL, Ending.UNPARSABLE_CALL, Ending.REFUSED_ACTION)


async def play_episode(
    client: Session,
    policy: ChatPolicy,
    task: Task,
    *,
    seed: int,
    settings: EpisodeSettings,
    sampling_key: tuple[int, int, int] | None = None,
    judge: Judge | None = None,
    answers: list[tuple[Turn, str]] | None = None,
    on_progress: Callable[[], None] = lambda: None,
    wait_for_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Trajectory | None:
    """Play one episode from its reset to its end.

    Args:
        client: A session of the environment.
        policy: The policy that plays.
        task: Turns observations into chats and answers into actions.
        seed: The environment's.
        settings: How it is played.
        sampling_key: The run's seed, the group and the sibling, if every completion is sampled with a seed of its own;
            None to use the engine's own generator.
        judge: Returns a reward for the answers, added to the environment's; None for no such reward.
        answers: The policy's answers in earlier attempts at this episode, with their texts; they are reused as long as
            the prompts are the same, and new answers are appended. If every attempt sampled anew, answers that
            seldom make the environment fail would be trained more often than the policy gives them.
        on_progress: Called after the reset and every step.
        wait_for_turn: Entered for every answer, which waits for those of other episodes too.

    Returns:
        The trajectory; None if the episode was over before the policy could act.

    Raises:
        openenv_core.ClientError: The session failed; the episode is lost, and the policy is not to blame.
        rl_bridge.errors.EpisodeLostError: The environment reports that its infrastructure failed; the policy is not to
            blame.
        rl_bridge.errors.EpisodeUnscoredError: The environment or the judge could not score the episode or gave a reward
            that is not finite; or no judge is available.
        rl_bridge.errors.GeneratorError: The engine failed.
        rl_bridge.errors.RolloutError: The task raised an error.
    """
    with span("reset", waits_for="environment"):
        result = await client.reset(seed=seed, **settings.reset_options)
    on_progress()
    require_scored(result)
    if result.done:
        return None
    first_observation, began = result.observation, time.monotonic()
    with span("begin", waits_for="environment"), convert_task_errors():
        dialogue = await task.begin(client, policy, first_observation)
    answers = [] if answers is None else answers
    episode = _Episode(
        client,
        policy,
        dialogue,
        settings,
        sampling_key,
        began,
        answers,
        on_progress,
        wait_for_turn,
    )
    episode.add_reward(result.reward)
    ending = await episode.run()
    used_answers = answers[: episode.exchanges]
    turns = [turn for turn, _ in used_answers]
    if not turns:
        return None
    if ending in ILL_FORMED:
        episode.add_reward(settings.illegal_reward)
    if judge is not None:
        with span("judge", waits_for="reward"):
            episode.add_reward(
                await judge_episode(judge, task, first_observation, [text for _, text in used_answers])
            )
    return Trajectory(
        seed=seed,
        turns=turns,
        ending=ending,
        reward=episode.total,
        tool_calls=episode.dialogue.tool_calls,
        refusal=episode.refusal,
        scores=episode.scores,
    )


@dataclass(slots=True)
class _Episode:
    """An episode in progress, after its reset."""

    client: Session
    policy: ChatPolicy
    dialogue: Dialogue
    settings: EpisodeSettings
    sampling_key: tuple[int, int, int] | None
    began: float
    answers: list[tuple[Turn, str]]
    on_progress: Callable[[], None]
    wait_for_turn: Callable[[], AbstractContextManager[None]]
    exchanges: int = 0
    total: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    refusal: str | None = None
    steps: int = 0

    def add_reward(self, reward: float | None) -> None:
        self.total += float(reward or 0.0)
        if not math.isfinite(
            self.total
        ):  # a sum of finite ones; siblings' advantages and the loss would be NaN
            raise EpisodeUnscoredError(f"expected rewards that are finite, got {reward!s:.20}")

    def add_scores(self, metadata: Mapping[str, Any] | None) -> None:
        """Add up the scores that the parts of the environment's rubric gave in a step."""
        parts = (metadata or {}).get(SCORES)
        for path, score in parts.items() if isinstance(parts, Mapping) else ():
            if isinstance(score, int | float):
                self.scores[path] = self.scores.get(path, 0.0) + score

    async def run(self) -> Ending:
        """Play the episode; returns how it ended."""
        while (ending := self._check_limits()) is None:
            with span("prompt"), convert_task_errors():
                prompt = self.dialogue.prompt()
            if prompt is None:
                return Ending.TRUNCATED_LENGTH
            if (ending := await self._exchange(prompt)) is not None:
                return ending
        return ending

    def _check_limits(self) -> Ending | None:
        settings = self.settings
        if settings.num_turns in (self.exchanges, self.steps):  # one answer may take several steps
            return Ending.TRUNCATED_TURNS
        if settings.timeout_s is not None and time.monotonic() - self.began >= settings.timeout_s:
            return Ending.TRUNCATED_TIME
        return None

    async def _exchange(self, prompt: Sequence[int]) -> Ending | None:
        turn, text = await self._get_answer(prompt)
        self.exchanges += 1
        try:
            with convert_task_errors():
                action = self.dialogue.read(turn.completion, text)
        except (ValueError, LookupError) as error:  # raised when parsing odd text, pydantic's errors included
            action = self._record_refusal(error)
        if not isinstance(action, Ending):
            return await self._take_steps(action)
        if action in ILL_FORMED and not turn.completion.stopped and self._truncates(turn):
            self.refusal = None
            self.add_reward(self.settings.illegal_reward)
            return Ending.TRUNCATED_LENGTH
        return action

    def _truncates(self, turn: Turn) -> bool:
        """Whether an answer that was cut truncates its episode: always if the context cut it, which had less room."""
        by_context = len(turn.completion.tokens) < self.policy.max_new_tokens
        return by_context or self.settings.cut_answer == "truncated"

    async def _get_answer(self, prompt: Sequence[int]) -> tuple[Turn, str]:
        key, number = self.sampling_key, self.exchanges
        if number < len(self.answers):
            turn, text = self.answers[number]
            if list(turn.prompt) == list(prompt):
                return turn, text
            del self.answers[number:]
        with self.wait_for_turn(), span("answer", waits_for="policy"), traced("answer", turn=number):
            answer = await self.policy.answer(
                prompt,
                temperature=self.settings.temperature,
                seed=None if key is None else sampling_seed(*key, number),
            )
        self.answers.append(answer)
        return answer

    async def _take_steps(self, actions: Sequence[Any]) -> Ending | None:
        for action in actions:
            if self.steps == self.settings.num_turns:
                return Ending.TRUNCATED_TURNS
            try:
                with span("step", waits_for="environment"):
                    result = await self.client.step(action)
            except (ValidationFailedError, PydanticSerializationError) as error:
                return self._record_refusal(error)
            self.on_progress()
            self.steps += 1
            require_scored(result)
            self.add_reward(result.reward)
            self.add_scores(result.metadata)
            with convert_task_errors():
                self.dialogue.add_observation(result.observation)
            if result.done:  # further actions are dropped
                return Ending.TRUNCATED_ENVIRONMENT if result.truncated else Ending.COMPLETED
        return None

    def _record_refusal(self, error: Exception) -> Ending:
        """Record why an answer was refused: it ends its episode, and never the run."""
        self.refusal = shorten_reason(f"{type(error).__name__}: {error}")
        return Ending.REFUSED_ACTION


@contextmanager
def convert_task_errors() -> Iterator[None]:
    """Turn what the task raises into a RolloutError, except errors that mean an answer is no action."""
    try:
        yield
    except (BridgeError, OpenEnvError, ValueError, LookupError):
        raise
    except Exception as error:
        raise RolloutError(f"the task raised\n{format_traceback(error)}") from error


async def judge_episode(judge: Judge, task: Task, first_observation: Any, texts: Sequence[str]) -> float:
    """Return the judge's reward for an episode; EpisodeUnscoredError if it gives none."""
    try:
        with convert_task_errors():
            messages, target = task.messages(first_observation), task.target(first_observation)
        reward = await judge(messages, "\n".join(texts), target)
    except (ReplicaLostError, NoReplicaError) as error:
        # Calls to judges are retried, so none is left by now.
        raise EpisodeUnscoredError(f"no reward function answered: {error}") from error
    if reward is None:
        raise EpisodeUnscoredError("the reward function gave no reward")
    return reward


BACKOFF_S: Final = 0.1
"""The pause before the second attempt; doubles before each further one."""
MAX_BACKOFF_S: Final = 5.0
"""The longest pause before any attempt."""


async def back_off(failures: int) -> None:
    """Wait before the next attempt after `failures` failures, at least one."""
    await asyncio.sleep(exponential_pause_s(failures, BACKOFF_S, MAX_BACKOFF_S))
