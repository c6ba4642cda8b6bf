"""Many episodes in flight: a fixed number of sessions, each playing one episode after another."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from openenv_core import EnvClient
from openenv_core.errors import (
    AccessRefused,
    AuthenticationFailed,
    CapacityReached,
    ClientError,
    ExecutionFailed,
    ServerError,
)
from rl_bridge.errors import EpisodeLost, EpisodeUnscored, RolloutError
from rl_bridge.rollout.episode import EpisodeSettings, play_episode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Task
from rl_bridge.types import Trajectory

logger = logging.getLogger(__name__)

Connect = Callable[[], EnvClient[Any, Any, Any]]
"""Makes a client that is not connected yet."""

BACKOFF_S = 0.1
"""Before the second attempt at an episode; doubles with each further one."""


class RolloutWorkers:
    """Plays episodes through a bounded number of sessions.

    A session that fails, or says that its infrastructure did, is replaced by a fresh one and its episode is tried
    again. An episode that keeps failing is dropped and counted: infrastructure is never scored as play. One whose
    environment cannot say how well it was played is left out, and counted apart.

    Args:
        connect: Makes a client; each session has its own.
        sessions: Episodes in flight.
        task: What ties the episodes to the policy.
        policy: Who plays.
        max_attempts: How often an episode is tried before it is dropped.
    """

    def __init__(
        self, connect: Connect, *, sessions: int, task: Task, policy: ChatPolicy, max_attempts: int
    ) -> None:
        self._connect = connect
        self._clients: list[EnvClient[Any, Any, Any] | None] = [None] * sessions
        self._task = task
        self._policy = policy
        self._max_attempts = max_attempts
        self._warned_of_narrow_server = False
        self.retried = 0
        """Attempts that failed through no fault of the policy's, since the beginning."""
        self.dropped = 0
        """Episodes given up, since the beginning."""
        self.unscored = 0
        """Episodes played to an end that has no reward, since the beginning."""
        self.last_failure: BaseException | None = None
        """Why an attempt failed last, if one has."""
        self.last_unscored: EpisodeUnscored | None = None
        """Why an episode had no reward last, if one had none."""

    async def play(
        self,
        seeds: Sequence[int],
        settings: EpisodeSettings,
        *,
        timeout_s: float,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Trajectory | None]:
        """Play one episode a seed.

        Args:
            seeds: Repeated seeds are siblings.
            settings: How they are played.
            timeout_s: For all of them together.
            progress: Told after each episode how many are done.

        Returns:
            One trajectory a seed, in order; None where the episode was dropped, had no reward, or had no turn.

        Raises:
            RolloutError: The time ran out, or no episode is left.
        """
        waiting = deque(enumerate(seeds))
        results: list[Trajectory | None] = [None] * len(seeds)
        dropped_before, unscored_before = self.dropped, self.unscored
        done = 0

        async def work(slot: int) -> None:
            nonlocal done
            while waiting:
                index, seed = waiting.popleft()
                try:
                    results[index] = await self._attempt(slot, seed, settings)
                except CapacityReached as refusal:
                    if waiting:  # sessions that the server has admitted play on
                        waiting.append((index, seed))
                        self._warn_of_narrow_server(refusal)
                        return
                    self.dropped += 1
                done += 1
                progress(done)

        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for slot in range(min(len(self._clients), len(seeds))):
                    group.create_task(work(slot))
        except TimeoutError:
            raise RolloutError(
                f"expected {len(seeds)} episodes within {timeout_s:g} s, got {done}; "
                "raise rollout.timeout_s, or look at what the environment waits for"
            ) from None
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several
        self.dropped += len(waiting)  # given back by every session: none was admitted
        if dropped := self.dropped - dropped_before:
            logger.warning(
                "%d of %d episodes dropped after %d attempts each, the last because: %s",
                dropped,
                len(seeds),
                self._max_attempts,
                self.last_failure,
            )
        if unscored := self.unscored - unscored_before:
            logger.warning(
                "%d of %d episodes left out without a reward, the last because: %s",
                unscored,
                len(seeds),
                self.last_unscored,
            )
        if seeds and all(result is None for result in results):
            raise self._nothing_left(len(seeds), dropped=dropped, unscored=unscored)
        return results

    def _nothing_left(self, count: int, *, dropped: int, unscored: int) -> RolloutError:
        if dropped:
            error = RolloutError(
                f"none of {count} episodes could be played; the last failure was: {self.last_failure}"
            )
            error.__cause__ = self.last_failure
        elif unscored:
            error = RolloutError(
                f"none of {count} episodes has a reward; the last because: {self.last_unscored}"
            )
            error.__cause__ = self.last_unscored
        else:
            error = RolloutError(
                f"none of {count} episodes had a turn: they were over when they began, "
                "or their first prompts leave no room for an answer (rollout.max_length)"
            )
        return error

    async def _attempt(self, slot: int, seed: int, settings: EpisodeSettings) -> Trajectory | None:
        failure: ClientError | EpisodeLost | None = None
        for attempt in range(self._max_attempts):
            try:
                client = await self._client(slot)
                return await play_episode(client, self._policy, self._task, seed=seed, settings=settings)
            except (AuthenticationFailed, AccessRefused):
                raise  # trying again cannot help
            except EpisodeUnscored as reason:
                self.unscored += 1  # the policy has played, so it is not played again until it suits
                self.last_unscored = reason
                return None
            except (ClientError, EpisodeLost) as error:
                if isinstance(error, ServerError) and not isinstance(
                    error, (ExecutionFailed, CapacityReached)
                ):
                    raise  # the server refuses what we send: trying again cannot help
                failure = self.last_failure = error
                self.retried += 1
                # Also after a time-out, which leaves the session standing: its episode is behind by a step that
                # nobody knows the outcome of.
                await self._discard(slot)
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        if isinstance(failure, CapacityReached):
            raise failure  # the episode is as good as new: another session may play it
        self.dropped += 1
        return None

    def _warn_of_narrow_server(self, refusal: CapacityReached) -> None:
        if not self._warned_of_narrow_server:
            self._warned_of_narrow_server = True
            logger.warning(
                "the server admits fewer than the %d sessions of env.sessions, the others play: %s",
                len(self._clients),
                refusal,
            )

    async def _client(self, slot: int) -> EnvClient[Any, Any, Any]:
        client = self._clients[slot]
        if client is None:
            client = self._connect()
            await client.connect()
            self._clients[slot] = client
        return client

    async def _discard(self, slot: int) -> None:
        client, self._clients[slot] = self._clients[slot], None
        if client is not None:
            await asyncio.gather(client.close(), return_exceptions=True)

    async def close(self) -> None:
        """Close every session."""
        await asyncio.gather(*(self._discard(slot) for slot in range(len(self._clients))))
