"""States of environments: taken from one session, kept for their owner, and given to others."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from openenv_core.protocol.errors import (
    CAPACITY_REACHED,
    EXECUTION_ERROR,
    VALIDATION_ERROR,
    RefusalError,
    short,
    text_of,
)
from servers.execution import CLOSE_TIMEOUT_S, FATAL, EnvironmentRunner, keep
from servers.sessions.session import EnvironmentSession

logger = logging.getLogger("servers")

MAX_SNAPSHOTS: Final = 256
"""Snapshots that a process keeps; of several workers each has as many."""

MAX_SNAPSHOT_BYTES: Final = 1 << 30
"""Bytes of all of them together, as far as the states tell."""


@dataclass(slots=True)
class SessionState:
    """What an environment's `snapshot` has returned.

    Attributes:
        state: The same.
        ended: The episode was over.
        users: Who must not see it closed: those that hold it to restore from, and restores.
    """

    state: Any
    ended: bool = False
    users: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        """How much memory it takes; 0 where that is not known."""
        size = len(self.state) if isinstance(self.state, bytes) else getattr(self.state, "nbytes", 0)
        return size if isinstance(size, int) else 0

    async def restore(self, runner: EnvironmentRunner) -> None:
        """Have a fresh environment go on from here; where it cannot, it is closed.

        Raises:
            Exception: Whatever the environment raised.
        """
        if self._closed:
            runner.discard()
            raise RuntimeError(
                "expected a state that is kept, got one that was closed; whoever asked has left"
            )
        self.users += 1
        try:
            await runner.call("restore", self.state)
        except BaseException:
            runner.discard()
            raise
        finally:
            runner.on_free(self.leave)  # a thread may be at it still

    def leave(self) -> None:
        """Count a user less."""
        self.users -= 1
        if self._closed:
            keep(asyncio.create_task(self.close()))

    async def close(self) -> None:
        """Give back what it holds, once nobody uses it. Whoever waits may be cancelled: it goes on."""
        self._closed = True
        if not self.users and callable(close := getattr(self.state, "close", None)):
            await asyncio.wait([keep(asyncio.create_task(_close(close)))])


async def _close(close: Callable[[], Any]) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            closing = close() if inspect.iscoroutinefunction(close) else await asyncio.to_thread(close)
            if inspect.isawaitable(closing):
                await closing
    except FATAL:
        logger.exception("closing a state of an environment failed")


async def state_of(session: EnvironmentSession, *, ended: bool) -> SessionState:
    """Return where a session's environment stands.

    Raises:
        RefusalError: It cannot tell, or did not within the time of a step; or as `EnvironmentSession.run`.
    """
    taken: list[SessionState] = []
    left = False

    def drop(state: SessionState) -> None:
        keep(asyncio.create_task(state.close()))

    async def take(runner: EnvironmentRunner) -> None:
        state = await runner.call("snapshot", unclaimed=lambda late: drop(SessionState(late)))
        taken.append(SessionState(state, ended))
        if left:  # the call went on without whoever asked
            drop(taken[-1])

    if not session.runner.forkable:
        raise RefusalError(
            EXECUTION_ERROR,
            f"expected an environment that can be forked, got {session.runner.name} without FORKABLE = True; see "
            "docs/tutorials/author.md",
        )
    try:
        await session.run_waiting(take)
    except BaseException as error:
        left = True
        for one in taken:  # whoever asked left as it came
            drop(one)
        if isinstance(error, FATAL) and not isinstance(error, RefusalError):
            raise RefusalError(EXECUTION_ERROR, text_of(error)) from error
        raise
    return taken[0]


class UnknownSnapshotError(RefusalError):
    """There is no such snapshot, or it is somebody else's: the answer is the same."""

    def __init__(self, snapshot: str) -> None:
        text = f"expected the id of a snapshot that is kept for you, got {short(snapshot)}; take another"
        super().__init__(VALIDATION_ERROR, text)


@dataclass(slots=True)
class _Kept:
    owner: str
    state: SessionState
    lease: asyncio.TimerHandle | None = None

    def close(self) -> asyncio.Task[None]:
        if self.lease is not None:
            self.lease.cancel()
        return keep(asyncio.create_task(self.state.close()))


class SnapshotTable:
    """Keeps states for their owners, a bounded number, each until it goes unused for the time of its lease.

    Args:
        lease_s: Seconds of it.
        per_owner: The greatest number of one caller's; None: only the bound of all.
        new_id: Draws ids.
    """

    def __init__(self, lease_s: float, per_owner: int | None, new_id: Callable[[], str]) -> None:
        self._lease_s = lease_s
        self._per_owner = per_owner
        self._new_id = new_id
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: str, state: SessionState) -> str:
        """Keep a state; return its id. One that cannot be kept is closed.

        Raises:
            RefusalError: CAPACITY_REACHED.
        """
        held = list(self._kept.values())
        own = sum(one.owner == owner for one in held)
        size = sum(one.state.nbytes for one in held) + state.nbytes
        refusal = None
        if len(held) >= MAX_SNAPSHOTS:
            refusal = f"{len(held)} snapshots are kept, and a process keeps no more"
        elif self._per_owner is not None and own >= self._per_owner:
            refusal = f"{own} snapshots of this token are kept, and a process keeps no more"
        elif size > MAX_SNAPSHOT_BYTES:
            refusal = f"the snapshots would take {size} bytes, and a process keeps {MAX_SNAPSHOT_BYTES}"
        if refusal is not None:
            keep(asyncio.create_task(state.close()))
            raise RefusalError(CAPACITY_REACHED, f"{refusal}; drop one, or try again later")
        snapshot = self._new_id()
        self._kept[snapshot] = kept = _Kept(owner, state)
        self._renew(snapshot, kept)
        return snapshot

    @contextmanager
    def use(self, owner: str, snapshot: str) -> Iterator[SessionState]:
        """Hold a state for as long as the block runs; its lease begins anew after it.

        Raises:
            RefusalError: `UnknownSnapshotError`.
        """
        kept = self._find(owner, snapshot)
        kept.state.users += 1
        try:
            yield kept.state
        finally:
            kept.state.leave()
            if snapshot in self._kept:
                self._renew(snapshot, kept)

    def drop(self, owner: str, snapshots: Sequence[str]) -> None:
        """Keep states no longer.

        Raises:
            RefusalError: `UnknownSnapshotError`; none is dropped then.
        """
        for snapshot, kept in {one: self._find(owner, one) for one in snapshots}.items():
            del self._kept[snapshot]
            kept.close()

    async def close(self) -> None:
        """Drop all of them, and wait until they are closed."""
        held, self._kept = self._kept, {}
        await asyncio.gather(*(kept.close() for kept in held.values()))

    def _find(self, owner: str, snapshot: str) -> _Kept:
        kept = self._kept.get(snapshot)
        if kept is None or kept.owner != owner:
            raise UnknownSnapshotError(snapshot)
        return kept

    def _renew(self, snapshot: str, kept: _Kept) -> None:
        if kept.lease is not None:
            kept.lease.cancel()
        kept.lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire, snapshot, kept)

    def _expire(self, snapshot: str, kept: _Kept) -> None:
        if kept.state.users:
            self._renew(snapshot, kept)
        else:
            del self._kept[snapshot]
            kept.close()
