"""A session in one episode's hands, and how long a worker waits for an environment."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from openenv_core import EnvClient, StepResult
from openenv_core.errors import CapacityError, ClientError, RequestTimeoutError, ValidationFailedError
from rl_bridge.config import Config


@dataclass(kw_only=True, slots=True, frozen=True)
class SessionDeadlines:
    """Every wait for an environment, in seconds.

    Attributes:
        free_s: Until a session is free: one of those that the worker may have, and again one of those that the servers
            have room for.
        connect_s: Until a session is open, all attempts and pauses together, where no server can be reached.
        reset_s: Until an episode has begun.
        step_s: Until a step has been taken.
    """

    free_s: float = 600.0
    connect_s: float = 60.0
    reset_s: float = 60.0
    step_s: float = 30.0

    @classmethod
    def of(cls, config: Config) -> Self:
        """As the configuration of a run on one environment says."""
        env = config.environment
        return cls(
            free_s=config.rollout.timeout_s,
            connect_s=env.connect_timeout_s,
            reset_s=env.reset_timeout_s,
            step_s=env.message_timeout_s,
        )


Client: TypeAlias = EnvClient[Any, Any, Any]

BACKOFF_S = 0.1
"""After the first failure; doubles with each further one."""
MAX_BACKOFF_S = 5.0
FULL_SERVER_BACKOFF_S = 1.0
"""Between two attempts at a server that has no room, where it does not say how long."""


class ServerRecord:
    """What is known of one server. All times are those of the event loop's clock, in seconds.

    A server that cannot be reached is asked again after a pause that grows, by one session alone. A server without
    room is asked for a few sessions more after a while.

    Args:
        url: Where it is.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.idle: list[tuple[float, Client]] = []
        """Open sessions that nobody uses, and since when; the one that was used last is the last."""
        self.held = 0
        """Sessions that are in use, or being opened or closed."""
        self.opening = 0
        """Those of them that are being opened."""
        self.gone = False
        """Whether it was taken off the list: it gets no further session, and those that end are not kept."""
        self._failures = 0
        self._retry_at = 0.0
        self._room: int | None = None
        self._ask_at = 0.0

    def usable(self, now: float) -> bool:
        """Whether a session can be had here, or may be worth asking for."""
        if self._failures and (now < self._retry_at or self.opening):
            return False
        if self.idle or self._room is None or self.held < self._room:
            return True
        return now >= self._ask_at

    def usable_at(self) -> float | None:
        """When to look again at a server that is not usable; None where something else has to happen first."""
        if self._failures:
            return None if self.opening else self._retry_at
        return self._ask_at

    @property
    def crowded(self) -> bool:
        """Whether it serves, but had no room for a session that was asked for."""
        return self._room is not None and not self._failures

    def asked(self, now: float) -> None:
        """A session is being opened."""
        self.held += 1
        self.opening += 1
        if self._room is not None and self.held > self._room:
            self._room, self._ask_at = self.held + self.held // 8, now + FULL_SERVER_BACKOFF_S

    def opened(self) -> None:
        """A session could be opened."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """It could not be reached, or a session broke."""
        if now < self._retry_at:
            return  # the sessions of a server that dies fail together: one failure, not one each
        pause = min(BACKOFF_S * 2**self._failures, MAX_BACKOFF_S)
        self._failures += 1
        self._retry_at = now + pause * random.uniform(0.5, 1.0)

    def refused(self, now: float, retry_after_s: float | None) -> None:
        """It has no room for a session that was asked for, which counts as held."""
        self._room = self.held - 1 + len(self.idle)
        self._ask_at = now + (
            FULL_SERVER_BACKOFF_S if retry_after_s is None else min(retry_after_s, MAX_BACKOFF_S)
        )

    def renewed(self) -> None:
        """Somebody says that it serves: what was known of it is out of date."""
        self._failures, self._retry_at, self._room = 0, 0.0, None


Learn: TypeAlias = Callable[[ServerRecord, BaseException], None]
Exchange: TypeAlias = Callable[["LeasedSession", float, CapacityError], Awaitable[None]]


class LeasedSession:
    """Resets and steps of one session, each within its deadline. `SessionLeases.lease` makes it.

    Args:
        address: The server.
        client: Connected to it.
        deadlines: Of a reset and of a step.
        learn: Told of failures, which say something of the server.
        exchange: Puts another session in the place of one that was refused, when there is room.
    """

    def __init__(
        self,
        address: ServerRecord,
        client: Client,
        *,
        deadlines: SessionDeadlines,
        learn: Learn,
        exchange: Exchange,
    ) -> None:
        self.address = address
        self.client = client
        self.broken = False
        """Whether a request failed. Nobody can say how its episode stands; the session is not used again.

        One that was refused has changed nothing.
        """
        self._deadlines = deadlines
        self._learn = learn
        self._exchange = exchange

    @property
    def url(self) -> str:
        """Where its server is."""
        return self.address.url

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode.

        A server that takes a session in and then has no room for it is a refusal like any other: the session
        moves to where there is room.

        Args:
            options: `seed` and whatever else the environment takes.

        Raises:
            openenv_core.ClientError: As `EnvClient.reset`; `RequestTimeoutError` after the deadline.
            rl_bridge.errors.SessionUnavailableError: No server had room in time.
        """
        began = asyncio.get_running_loop().time()
        while True:
            try:
                return await self._within(
                    self._deadlines.reset_s, "reset", "env.reset_timeout_s", self.client.reset(**options)
                )
            except CapacityError as refusal:
                await self._exchange(self, began, refusal)
                self.broken = False

    async def step(self, action: Any) -> StepResult[Any]:
        """Take a step.

        Raises:
            openenv_core.ClientError: As `EnvClient.step`; `RequestTimeoutError` after the deadline.
        """
        return await self._within(
            self._deadlines.step_s, "step", "env.message_timeout_s", self.client.step(action)
        )

    async def _within(
        self, seconds: float, what: str, key: str, request: Awaitable[StepResult[Any]]
    ) -> StepResult[Any]:
        sound = False
        try:
            async with asyncio.timeout(seconds) as timeout:
                result = await request
            sound = True
            return result
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise RequestTimeoutError(
                f"expected a {what} of {self.url} within {seconds:g} s, it is not done; "
                f"raise {key}, or see what the environment waits for"
            ) from error
        except ValidationFailedError:
            sound = True
            raise
        except ClientError as error:
            self._learn(self.address, error)
            raise
        finally:
            self.broken = not sound
