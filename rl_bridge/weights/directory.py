"""The directory of published snapshots, which alone records when a snapshot is complete or overwritten."""

import asyncio
from dataclasses import dataclass, field

from rl_bridge.errors import WeightsError
from rl_bridge.weights.snapshot import Contribution, Key, Origin, Publication, Snapshot, key_text


@dataclass(kw_only=True, slots=True, frozen=True)
class Unfinished:
    """A key that is being published.

    Attributes:
        origins: The publishers that have announced it and not finished.
        missing: The ranks that have not announced it.
    """

    origins: tuple[Origin, ...]
    missing: tuple[int, ...]


@dataclass(slots=True)
class _Entry:
    publication: Publication
    ranks: int
    announced: dict[int, Origin] = field(default_factory=dict)
    finished: dict[int, Contribution] = field(default_factory=dict)
    failure: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.failure is None and len(self.finished) == self.ranks


class WeightDirectory:
    """Records snapshots by key. It lives in the process that owns the store; others use a `RemoteDirectory`.

    Publishing a key again replaces its snapshot. Publishing a version also removes all later versions, which are from
    before the run went back. Once a newer group of publishers has appeared, messages of earlier groups are refused:
    they may have been in transit when that group ended.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._groups: dict[str | None, list[str]] = {}
        """By name, or None for all versions, the groups that have published; the last is the current one."""
        self._closed = False
        self._changed = asyncio.Condition()

    async def announce(
        self, key: Key, publication: Publication, origin: Origin, ranks: int, replaces: Key | None
    ) -> None:
        """Record that a rank starts publishing into a segment that has held `replaces` so far.

        Raises:
            WeightsError: The store is closed, the publisher's group has been replaced, or the ranks disagree on their
                number.
        """
        async with self._changed:
            self._require_current(key, publication)
            if replaces is not None and replaces != key:
                self._entries.pop(replaces, None)
            if isinstance(key, int):
                # Later versions are from before the run went back; the publishers of other groups are gone.
                for other in [k for k in self._entries if isinstance(k, int)]:
                    if other > key or self._entries[other].publication.group != publication.group:
                        self._entries.pop(other)
            entry = self._entries.get(key)
            if entry is None or entry.publication != publication:
                entry = self._entries[key] = _Entry(publication, ranks)
            if entry.ranks != ranks:
                raise WeightsError(f"expected {entry.ranks} ranks to publish {key_text(key)}, got {ranks}")
            entry.announced[origin.rank] = origin
            self._changed.notify_all()

    async def complete(self, key: Key, publication: Publication, contribution: Contribution) -> None:
        """Record that a rank has published; the last rank completes the snapshot. Raises as `announce` does."""
        async with self._changed:
            self._require_current(key, publication)
            entry = self._entries.get(key)
            if entry is None or entry.publication != publication:
                raise WeightsError(f"{key_text(key)} was published again, or dropped, before it was finished")
            entry.finished[contribution.origin.rank] = contribution
            self._changed.notify_all()

    async def abandon(self, key: Key, publication: Publication, rank: int, reason: str) -> None:
        """Record that a rank will not finish; waiters for the key get an error with the reason."""
        async with self._changed:
            entry = self._entries.get(key)
            if entry is not None and entry.publication == publication:
                entry.failure = f"rank {rank} could not publish it: {reason}"
                self._changed.notify_all()

    async def find(self, key: Key, wait_s: float) -> Snapshot | Unfinished:
        """Look a key up; waits up to `wait_s` seconds if it is being published, then returns an `Unfinished`.

        Raises:
            WeightsError: There is no such key, a rank could not publish it, or the store is closed.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._is_decided(key))
            except TimeoutError:
                if not self._is_decided(key):
                    entry = self._entries[key]
                    return Unfinished(
                        origins=tuple(
                            entry.announced[rank]
                            for rank in sorted(entry.announced.keys() - entry.finished.keys())
                        ),
                        missing=tuple(rank for rank in range(entry.ranks) if rank not in entry.announced),
                    )
            self._require_open()
            entry = self._entries[key]
            if entry.failure is not None:
                raise WeightsError(f"{key_text(key)} was not published: {entry.failure}")
            return Snapshot(
                key=key,
                publication=entry.publication,
                contributions=[entry.finished[rank] for rank in range(entry.ranks)],
            )

    def _is_decided(self, key: Key) -> bool:
        if self._closed:
            return True
        entry = self._entries.get(key)
        if entry is None:
            published = ", ".join(key_text(k) for k, e in self._entries.items() if e.is_complete)
            raise WeightsError(
                f"expected {key_text(key)} to have been published and kept; there is: {published or 'nothing'}"
            )
        return entry.is_complete or entry.failure is not None

    async def is_current(self, key: Key, publication: Publication) -> bool:
        """Whether a snapshot has not been overwritten, so that everything fetched of it until now is valid."""
        self._require_open()
        entry = self._entries.get(key)
        return entry is not None and entry.publication == publication

    async def close(self) -> None:
        """Close the directory: calls to publish or find raise from now on, and waiters get an error."""
        async with self._changed:
            self._closed = True
            self._entries.clear()
            self._changed.notify_all()

    def group(self) -> str:
        """Return the name of the caller's group of publishers, the same on every rank: here always this process."""
        return "local"

    def _require_open(self) -> None:
        if self._closed:
            raise WeightsError("the weight store is closed")

    def _require_current(self, key: Key, publication: Publication) -> None:
        self._require_open()
        groups = self._groups.setdefault(None if isinstance(key, int) else key, [])
        if publication.group in groups[:-1]:
            raise WeightsError(
                f"{key_text(key)} comes from a publisher that has been replaced by a newer one"
            )
        if publication.group not in groups:
            groups.append(publication.group)
