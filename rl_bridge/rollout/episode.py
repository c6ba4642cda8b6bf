"""One trajectory: the policy plays one episode through one session; again what failed by no fault of its own."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydantic_core import PydanticSerializationError

from openenv_core import StepResult
from openenv_core.errors import OpenEnvError, ValidationFailedError
from openenv_core.rubrics import SCORES
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
"""Of what an environment says of a failure so much is told: it goes into logs, and into every checkpoint."""


def shortened(reason: str) -> str:
    """Return as much of a reason as is told, without halves of characters: no checkpoint could be written with them."""
    text = reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]} …"
    return text.encode(errors="replace").decode()


def require_play(result: StepResult[Any]) -> None:
    """Raise EpisodeLostError where something other than the policy failed, which makes its rewards meaningless.

    EpisodeUnscoredError where the episode is over, and nobody can say how well it was played.
    """
    if (failure := result.infrastructure_error) is not None:
        raise EpisodeLostError(failure)
    if (reason := result.unscored) is not None:
        raise EpisodeUnscoredError(reason)


@dataclass(kw_only=True, slots=True, frozen=True)
class Branch:
    """Where siblings part that have begun as one.

    Attributes:
        prompts: Those of the turns that they share, and that of the first that each has for itself.
        answers: What the policy said in the former, with its texts.
        results: What the environment answered to the reset and to each step until there.
    """

    prompts: list[Sequence[int]]
    answers: list[tuple[Turn, str]]
    results: list[StepResult[Any]]


class RecordingSession:
    """A session that begins with known results of a reset and the first steps, and keeps those that come behind them.

    The session that is asked once they are spent stands where they end.
    """

    def __init__(self, session: Session, known: Sequence[StepResult[Any]] = ()) -> None:
        self._session = session
        self._known = deque(known)
        self.results = list(known)

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode, unless it has begun."""
        return self._known.popleft() if self._known else self._kept(await self._session.reset(**options))

    async def step(self, action: Any, /) -> StepResult[Any]:
        """Take a step, unless it has been taken."""
        return self._known.popleft() if self._known else self._kept(await self._session.step(action))

    def _kept(self, result: StepResult[Any]) -> StepResult[Any]:
        self.results.append(result)
        return result


Judge: TypeAlias = Callable[[Sequence[ChatMessage], str, Any], Awaitable[float | None]]
"""Told the chat that an episode began with, the policy's answers, a line each, and the task's target."""

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
    fork_turn: int | None = None,
    branch: Branch | None = None,
) -> Trajectory | Branch | None:
    """Play one episode from its seed to its end, or to where it is to be forked.

    Args:
        client: A session of the environment.
        policy: Who plays.
        task: What ties the two together.
        seed: The environment's.
        settings: How it is played.
        sampling_key: The run's seed, the group and the sibling, where every completion is to be sampled with a seed
            of its own; None where the engine's generator goes on as it pleases.
        judge: Says what the answers earn beside what the environment gives; None where nothing else counts.
        answers: What the policy said in earlier attempts at this episode, with its texts; it says so again as long as
            the prompts are the same, and what it says beyond is added. Were answers drawn anew until nothing fails,
            those by which an environment fails seldom would be trained more often than the policy gives them.
        fork_turn: After how many turns it is to be forked.
        branch: Where it parts from its siblings: what is before that is context, and no part of the trajectory.

    Returns:
        The trajectory, or the branch where it came to `fork_turn`; None where the episode was over before the policy
        could act.

    Raises:
        openenv_core.ClientError: The session failed; the episode is lost, through no fault of the policy's.
        rl_bridge.errors.EpisodeLostError: The environment says that its infrastructure failed, or does not come to the
            branch again; likewise.
        rl_bridge.errors.EpisodeUnscoredError: It, or the judge, says that nobody knows how well the episode was played,
            or gives a reward that is no number; or there is no judge to be had.
        rl_bridge.errors.GeneratorError: The engine failed.
        rl_bridge.errors.RolloutError: The task raised something.
    """
    session = client if fork_turn is None else (client := RecordingSession(client))
    with span("reset", waits_for="environment"):
        result = await client.reset(seed=seed, **settings.reset_options)
    require_play(result)
    if result.done:
        return None
    first, began = result.observation, time.monotonic()
    with span("begin", waits_for="environment"), _of_the_task():
        dialogue = await task.begin(client, policy, first)
    shared = [] if branch is None else branch.prompts
    answers = [] if answers is None else answers
    episode = _Episode(client, policy, dialogue, settings, sampling_key, began, answers, shared, fork_turn)
    episode.earn(result.reward)
    ending = await episode.run()
    played = answers[: episode.exchanges]
    if ending is None:
        assert isinstance(session, RecordingSession)
        prompts = [*(turn.prompt for turn, _ in played), episode.prompt]
        return Branch(prompts=prompts, answers=played, results=session.results)
    turns = [turn for turn, _ in played[max(0, len(shared) - 1) :]]
    if not turns:
        return None
    if ending in ILL_FORMED:
        episode.earn(settings.illegal_reward)
    if judge is not None:
        with span("judge", waits_for="reward"):
            episode.earn(await _judged(judge, task, first, [text for _, text in played]))
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
    """An episode under way, from after its reset."""

    client: Session
    policy: ChatPolicy
    dialogue: Dialogue
    settings: EpisodeSettings
    sampling_key: tuple[int, int, int] | None
    began: float
    answers: list[tuple[Turn, str]]
    shared: Sequence[Sequence[int]]
    fork_turn: int | None
    prompt: Sequence[int] = ()
    exchanges: int = 0
    total: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    refusal: str | None = None
    steps: int = 0

    def earn(self, reward: float | None) -> None:
        try:
            self.total += float(reward or 0.0)
        except OverflowError:  # JSON has whole numbers of any length
            self.total = math.inf
        if not math.isfinite(self.total):  # it would make the advantages of all siblings NaN, and so the loss
            raise EpisodeUnscoredError(f"expected rewards that are finite, got {reward!s:.20}")

    def score(self, metadata: Mapping[str, Any] | None) -> None:
        """Count what the parts of the environment's rubric gave in a step."""
        parts = (metadata or {}).get(SCORES)
        for path, score in parts.items() if isinstance(parts, Mapping) else ():
            if isinstance(score, int | float) and math.isfinite(score):
                self.scores[path] = self.scores.get(path, 0.0) + score

    async def run(self) -> Ending | None:
        """Play the episode; returns how it ended, or None where it is to be forked."""
        while (ending := self._limit()) is None:
            with span("prompt"), _of_the_task():
                prompt = self.dialogue.prompt()
            if prompt is None:
                return Ending.TRUNCATED_LENGTH
            number = self.exchanges
            if number < len(self.shared) and list(prompt) != list(self.shared[number]):
                raise EpisodeLostError("the environment did not come again to where its group begins")
            self.prompt = prompt
            if number == self.fork_turn:
                return None
            if (ending := await self._exchange(prompt)) is not None:
                return ending
        return ending

    def _limit(self) -> Ending | None:
        settings = self.settings
        if settings.num_turns in (self.exchanges, self.steps):  # one answer may take several steps
            return Ending.TRUNCATED_TURNS
        if settings.timeout_s is not None and time.monotonic() - self.began >= settings.timeout_s:
            return Ending.TRUNCATED_TIME
        return None

    async def _exchange(self, prompt: Sequence[int]) -> Ending | None:
        turn, text = await self._answer(prompt)
        self.exchanges += 1
        try:
            with _of_the_task():
                action = self.dialogue.read(turn.completion, text)
        except (ValueError, LookupError) as error:  # what reading odd text comes to, pydantic's own included
            return self._refused(error)
        return action if isinstance(action, Ending) else await self._act(action)

    async def _answer(self, prompt: Sequence[int]) -> tuple[Turn, str]:
        key, number = self.sampling_key, self.exchanges
        if number < len(self.answers):
            turn, text = self.answers[number]
            if list(turn.prompt) == list(prompt):
                return turn, text
            del self.answers[number:]
        with span("answer", waits_for="policy"), traced("answer", turn=number):
            answer = await self.policy.answer(
                prompt,
                temperature=self.settings.temperature,
                seed=None if key is None else sampling_seed(*key, number),
            )
        self.answers.append(answer)
        return answer

    async def _act(self, actions: Sequence[Any]) -> Ending | None:
        for action in actions:
            if self.steps == self.settings.num_turns:
                return Ending.TRUNCATED_TURNS
            try:
                with span("step", waits_for="environment"):
                    result = await self.client.step(action)
            except (ValidationFailedError, PydanticSerializationError) as error:
                return self._refused(error)
            self.steps += 1
            require_play(result)
            self.earn(result.reward)
            self.score(result.metadata)
            with _of_the_task():
                self.dialogue.hear(result.observation)
            if result.done:  # nobody is there to take what comes behind it
                return Ending.TRUNCATED_ENVIRONMENT if result.truncated else Ending.COMPLETED
        return None

    def _refused(self, error: Exception) -> Ending:
        """What the policy wrote may end its episode, and nothing else."""
        self.refusal = shortened(f"{type(error).__name__}: {error}")
        return Ending.REFUSED_ACTION


@contextmanager
def _of_the_task() -> Iterator[None]:
    """What the task raises is a mistake in it, unless it says that an answer means nothing."""
    try:
        yield
    except (BridgeError, OpenEnvError, ValueError, LookupError):
        raise
    except Exception as error:
        raise RolloutError(f"the task raised\n{format_traceback(error)}") from error


async def _judged(judge: Judge, task: Task, first: Any, texts: Sequence[str]) -> float:
    try:
        with _of_the_task():
            messages, target = task.messages(first), task.target(first)
        reward = await judge(messages, "\n".join(texts), target)
    except (ReplicaLostError, NoReplicaError) as error:
        # Calls to judges are repeated, so by now there is none.
        raise EpisodeUnscoredError(f"no reward function answered: {error}") from error
    if reward is None:
        raise EpisodeUnscoredError("the reward function gave no reward")
    return reward


BACKOFF_S: Final = 0.1
"""Before the second attempt; doubles with each further one."""
MAX_BACKOFF_S: Final = 5.0
"""Before any attempt at most."""


async def back_off(failed: int) -> None:
    """Wait before the next attempt, where so many have failed; at least one."""
    doublings = min(failed - 1, 32)  # far beyond the bound; a thousand would be beyond what a float can be
    await asyncio.sleep(min(BACKOFF_S * 2**doublings, MAX_BACKOFF_S))
