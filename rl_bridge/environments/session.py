"""A session in one episode's hands."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from openenv_core import StepResult
from openenv_core.errors import CapacityReached, ClientError, RequestTimeout, ValidationFailed
from rl_bridge.environments.address import Address, Client
from rl_bridge.environments.deadlines import SessionDeadlines

Learn: TypeAlias = Callable[[Address, BaseException], None]
Exchange: TypeAlias = Callable[["LeasedSession", float, CapacityReached], Awaitable[None]]


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
        address: Address,
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
            openenv_core.ClientError: As `EnvClient.reset`; `RequestTimeout` after the deadline.
            rl_bridge.errors.SessionUnavailable: No server had room in time.
        """
        began = asyncio.get_running_loop().time()
        while True:
            try:
                return await self._within(
                    self._deadlines.reset_s, "reset", "env.reset_timeout_s", self.client.reset(**options)
                )
            except CapacityReached as refusal:
                await self._exchange(self, began, refusal)
                self.broken = False

    async def step(self, action: Any) -> StepResult[Any]:
        """Take a step.

        Raises:
            openenv_core.ClientError: As `EnvClient.step`; `RequestTimeout` after the deadline.
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
            raise RequestTimeout(
                f"expected a {what} of {self.url} within {seconds:g} s, it is not done; "
                f"raise {key}, or see what the environment waits for"
            ) from error
        except ValidationFailed:
            sound = True
            raise
        except ClientError as error:
            self._learn(self.address, error)
            raise
        finally:
            self.broken = not sound
