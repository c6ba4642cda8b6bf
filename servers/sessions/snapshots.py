"""Snapshots: states of environments, taken from one session, stored for its owner, and restored in others."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from openenv_core.protocol.errors import (
    CAPACITY_REACHED,
    EXECUTION_ERROR,
    VALIDATION_ERROR,
    RefusalError,
    short,
    text_of,
)
from servers.execution import CLOSE_TIMEOUT_S, FATAL, keep
from servers.sessions.session import AwaitedCall, EnvironmentSession, pending_or_plain

logger = logging.getLogger("servers")

MAX_SNAPSHOTS: Final = 256
"""Greatest number of snapshots stored in one process; each worker has this limit."""

MAX_SNAPSHOT_BYTES: Final = 1 << 30
"""Greatest total size of the snapshots of one process, in bytes, as far as the states report theirs."""


@dataclass(slots=True)
class SessionState:
    """A state of an environment.

    Attributes:
        state: What the environment's `snapshot` returned.
        episode_ended: Whether the episode was over.
        unscored: Why the episode cannot be scored, as of `EnvironmentSession`.
        owner: Who has stored it, if it is stored.
        lease: Drops it when it has been stored for long enough.
        users: References to it: by holders that may restore it, and by running restores. After `close`, the state is
            closed when the last one leaves.
    """

    state: Any
    episode_ended: bool = False
    unscored: str | None = None
    owner: str = field(default="", init=False)
    lease: asyncio.TimerHandle | None = field(default=None, init=False)
    users: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 if unknown."""
        size = len(self.state) if isinstance(self.state, bytes) else getattr(self.state, "nbytes", 0)
        return size if isinstance(size, int) else 0

    @classmethod
    async def take(cls, session: EnvironmentSession, *, episode_ended: bool) -> "SessionState":
        """Return the state of a session's environment.

        Raises:
            RefusalError: The environment cannot be forked, or its `snapshot` failed; or as of a session's `perform`.
        """
        environment = session.environment
        if getattr(environment, "FORKABLE", False) is not True:
            raise RefusalError(
                EXECUTION_ERROR,
                f"expected an environment that can be forked, got {session.name} without FORKABLE = True; see "
                "docs/tutorials/author.md",
            )

        snapshot: Callable[[], Any] = environment.snapshot
        try:
            state = await session.perform(
                AwaitedCall(
                    lambda: pending_or_plain(snapshot()),
                    session.is_on_loop(snapshot),
                    lambda state: cls(state).discard(),
                )
            )
        except FATAL as error:
            if isinstance(error, RefusalError):
                raise
            raise RefusalError(EXECUTION_ERROR, text_of(error)) from error
        return cls(state, episode_ended, session.unscored)

    async def restore(self, session: EnvironmentSession) -> None:
        """Restore a new environment to this state; close the environment on failure.

        Raises:
            Exception: Whatever the environment raised.
        """
        if self._closed:
            session.discard()
            raise RuntimeError(
                "the state was closed before it could be restored: the client has disconnected"
            )
        self.users += 1
        try:
            restore = partial(session.invoke_method, "restore", (self.state,))
            await session.run(restore, session.is_on_loop(session.environment.restore))
            session.unscored = self.unscored
        except BaseException:
            session.discard()
            raise
        finally:
            session.on_free(self.release)  # an abandoned call may still use the state in a thread

    def release(self) -> None:
        """Remove one reference."""
        self.users -= 1
        if self._closed:
            self.discard()

    def discard(self) -> "asyncio.Task[None]":
        """Close the state in the background, as `close`."""
        if self.lease is not None:
            self.lease.cancel()
        return keep(asyncio.create_task(self.close()))

    async def close(self) -> None:
        """Close the state, once it has no users. This continues even if the caller is cancelled."""
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


class UnknownSnapshotError(RefusalError):
    """There is no such snapshot, or another owner has it; the error is the same for both."""

    def __init__(self, snapshot: str) -> None:
        text = f"no snapshot {short(snapshot)} is kept for you; take another"
        super().__init__(VALIDATION_ERROR, text)


class SnapshotTable:
    """Stores a bounded number of states for their owners, each until its lease expires.

    Args:
        lease_s: Seconds that a state is stored after its last use.
        per_owner: Greatest number of states of one owner; None for no other limit than the total.
        new_id: Generates ids.
    """

    def __init__(self, lease_s: float, per_owner: int | None, new_id: Callable[[], str]) -> None:
        self._lease_s = lease_s
        self._per_owner = per_owner
        self._new_id = new_id
        self._snapshots: dict[str, SessionState] = {}

    def __len__(self) -> int:
        return len(self._snapshots)

    def store(self, owner: str, state: SessionState) -> str:
        """Store a state and return its id.

        Raises:
            RefusalError: CAPACITY_REACHED. The state is closed.
        """
        snapshots = list(self._snapshots.values())
        owned = sum(one.owner == owner for one in snapshots)
        size = sum(one.nbytes for one in snapshots) + state.nbytes
        refusal = None
        if len(snapshots) >= MAX_SNAPSHOTS:
            refusal = f"{len(snapshots)} snapshots are kept, and a process keeps no more"
        elif self._per_owner is not None and owned >= self._per_owner:
            refusal = f"{owned} snapshots of this token are kept, and a process keeps no more"
        elif size > MAX_SNAPSHOT_BYTES:
            refusal = f"the snapshots would take {size} bytes, and a process keeps {MAX_SNAPSHOT_BYTES}"
        if refusal is not None:
            state.discard()
            raise RefusalError(CAPACITY_REACHED, f"{refusal}; drop one, or try again later")
        snapshot = self._new_id()
        state.owner = owner
        self._snapshots[snapshot] = state
        self._renew(snapshot, state)
        return snapshot

    @contextmanager
    def use(self, owner: str, snapshot: str) -> Iterator[SessionState]:
        """Hold a state for the duration of a `with` block; its lease is renewed afterwards.

        Raises:
            RefusalError: `UnknownSnapshotError`.
        """
        state = self._find(owner, snapshot)
        state.users += 1
        try:
            yield state
        finally:
            state.release()
            if snapshot in self._snapshots:
                self._renew(snapshot, state)

    def drop(self, owner: str, snapshots: Sequence[str]) -> None:
        """Drop states, all or none.

        Raises:
            RefusalError: `UnknownSnapshotError`.
        """
        for snapshot, state in {one: self._find(owner, one) for one in snapshots}.items():
            del self._snapshots[snapshot]
            state.discard()

    async def close(self) -> None:
        """Drop all states and wait until they are closed."""
        snapshots, self._snapshots = self._snapshots, {}
        await asyncio.gather(*(state.discard() for state in snapshots.values()))

    def _find(self, owner: str, snapshot: str) -> SessionState:
        state = self._snapshots.get(snapshot)
        if state is None or state.owner != owner:
            raise UnknownSnapshotError(snapshot)
        return state

    def _renew(self, snapshot: str, state: SessionState) -> None:
        if state.lease is not None:
            state.lease.cancel()
        state.lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire, snapshot, state)

    def _expire(self, snapshot: str, state: SessionState) -> None:
        if state.users:
            self._renew(snapshot, state)
        else:
            del self._snapshots[snapshot]
            state.discard()
