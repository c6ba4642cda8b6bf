"""The directory as a Monarch actor in the controller's own process: it dies when the run does, not before."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from rl_bridge.errors import BridgeError, MissingDependencyError, WeightsError
from rl_bridge.types import PolicyVersion
from rl_bridge.weights.directory import LocalDirectory, Unfinished
from rl_bridge.weights.snapshot import Contribution, Key, Origin, Publication, Snapshot

try:
    from monarch.actor import Actor, ActorError, concurrent_endpoint, context, this_proc
except ModuleNotFoundError as missing:
    raise MissingDependencyError("torchmonarch") from missing

T = TypeVar("T")

RESPONSE_TIMEOUT_S = 30.0
"""The longest that an answer of the directory may take, beyond what it was asked to wait."""


class DirectoryActor(Actor):
    """A thin shell around `LocalDirectory`."""

    def __init__(self) -> None:
        self._directory = LocalDirectory()

    @concurrent_endpoint
    async def announce(
        self, key: Key, publication: Publication, origin: Origin, ranks: int, replaces: Key | None
    ) -> None:
        """See `Directory`."""
        await self._directory.announce(key, publication, origin, ranks, replaces)

    @concurrent_endpoint
    async def complete(self, key: Key, publication: Publication, contribution: Contribution) -> None:
        """See `Directory`."""
        await self._directory.complete(key, publication, contribution)

    @concurrent_endpoint
    async def abandon(self, key: Key, publication: Publication, rank: int, why: str) -> None:
        """See `Directory`."""
        await self._directory.abandon(key, publication, rank, why)

    @concurrent_endpoint
    async def find(self, key: Key, wait_s: float) -> Snapshot | Unfinished:
        """See `Directory`."""
        return await self._directory.find(key, wait_s)

    @concurrent_endpoint
    async def latest(self) -> PolicyVersion | None:
        """See `Directory`."""
        return await self._directory.latest()

    @concurrent_endpoint
    async def lease(self, key: Key, publication: Publication, holder: str, seconds: float) -> None:
        """See `Directory`."""
        await self._directory.lease(key, publication, holder, seconds)

    @concurrent_endpoint
    async def end_lease(self, key: Key, publication: Publication, holder: str) -> None:
        """See `Directory`."""
        await self._directory.end_lease(key, publication, holder)

    @concurrent_endpoint
    async def retire(self, key: Key, publication: Publication) -> list[str]:
        """See `Directory`."""
        return await self._directory.retire(key, publication)

    @concurrent_endpoint
    async def close(self) -> None:
        """See `Directory`."""
        await self._directory.close()


class RemoteDirectory:
    """The directory as the processes of a run see it; travels to them.

    Args:
        actor: Mesh of the `DirectoryActor`.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def announce(
        self, key: Key, publication: Publication, origin: Origin, ranks: int, replaces: Key | None
    ) -> None:
        """See `Directory`."""
        await _answer(self._actor.announce.call_one(key, publication, origin, ranks, replaces))

    async def complete(self, key: Key, publication: Publication, contribution: Contribution) -> None:
        """See `Directory`."""
        await _answer(self._actor.complete.call_one(key, publication, contribution))

    async def abandon(self, key: Key, publication: Publication, rank: int, why: str) -> None:
        """See `Directory`."""
        await _answer(self._actor.abandon.call_one(key, publication, rank, why))

    async def find(self, key: Key, wait_s: float) -> Snapshot | Unfinished:
        """See `Directory`."""
        found: Snapshot | Unfinished = await _answer(self._actor.find.call_one(key, wait_s), wait_s)
        return found

    async def latest(self) -> PolicyVersion | None:
        """See `Directory`."""
        version: PolicyVersion | None = await _answer(self._actor.latest.call_one())
        return version

    async def lease(self, key: Key, publication: Publication, holder: str, seconds: float) -> None:
        """See `Directory`."""
        await _answer(self._actor.lease.call_one(key, publication, holder, seconds))

    async def end_lease(self, key: Key, publication: Publication, holder: str) -> None:
        """See `Directory`."""
        await _answer(self._actor.end_lease.call_one(key, publication, holder))

    async def retire(self, key: Key, publication: Publication) -> list[str]:
        """See `Directory`."""
        holders: list[str] = await _answer(self._actor.retire.call_one(key, publication))
        return holders

    async def close(self) -> None:
        """See `Directory`."""
        await _answer(self._actor.close.call_one())

    def group(self) -> str:
        """The calling actor's mesh: all ranks have it in common, and what is spawned later has another."""
        return str(context().actor_instance.actor_id).partition(".")[0]


def spawn_directory() -> RemoteDirectory:
    """Start a directory in this process."""
    return RemoteDirectory(this_proc().spawn("weights_directory", DirectoryActor))


async def _answer(call: Awaitable[T], wait_s: float = 0.0) -> T:
    try:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S + wait_s):
            return await call
    except ActorError as error:
        if isinstance(error.exception, BridgeError):
            raise error.exception from error
        raise WeightsError(f"the directory of the weight store failed: {error}") from error
    except TimeoutError:
        raise WeightsError(
            f"expected an answer of the weight store's directory within {RESPONSE_TIMEOUT_S + wait_s:g} s, got none; "
            "it lives in the run's controller: is that alive, and not blocked?"
        ) from None
