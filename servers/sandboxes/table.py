"""The sandboxes of a service: admission under caps, leases, and an end that is tried until it succeeds."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Final, TypeAlias, TypeVar

from openenv_core.errors import OpenEnvError, ServerStartError
from openenv_core.providers.remote import MAX_LOG_BYTES, RemoteSandbox, SandboxSpec, SandboxState
from servers.sandboxes.backends import Backend, SandboxProvider
from servers.sandboxes.limits import SandboxLimits, SandboxRefusalError

_Start: TypeAlias = str | BaseException | None
"""What comes of a start: where it is, None where it was given up before, or what it failed of."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A sandbox. Changes on the service's loop alone; `doomed` is read by threads."""

    id: str
    owner: str  # the name of the token that asked for it
    provider: SandboxProvider
    expires: float  # in the loop's time
    state: SandboxState = SandboxState.STARTING
    url: str | None = None
    reason: str | None = None
    output: str = ""  # the last that it printed, once it has ended
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # it is no longer starting
    doomed: bool = False  # it is to go, and nothing of it is started any more
    job: "Future[_Start] | None" = None  # its start, in a thread
    starting: "asyncio.Task[None] | None" = None  # what waits for that
    ending: "asyncio.Task[None] | None" = None  # the removal that is under way
    again: float = 0.0  # when a removal that failed is tried again

    def told(self, now: float) -> RemoteSandbox:
        """Return what its owner is told."""
        return RemoteSandbox(
            id=self.id,
            state=self.state,
            url=self.url if self.state is SandboxState.RUNNING else None,
            expires_in_s=max(0.0, round(self.expires - now, 3)),
            reason=self.reason,
        )

    def over(self, reason: str, output: str = "") -> None:
        """Note that it has ended; the first reason stands."""
        if self.state is not SandboxState.ENDED:
            self.state, self.reason, self.output = SandboxState.ENDED, reason, output
        self.settled.set()


logger = logging.getLogger("servers")

T = TypeVar("T")

POLL_INTERVAL_S: Final = 0.25
"""How often leases are looked at."""

RETRY_INTERVAL_S: Final = 1.0
"""Pause before a removal that failed is tried again: the engine may be restarting."""

RETRY_AFTER_S: Final = 5
_HELPERS: Final = 8
"""Threads for everything but starts. Their queue is bounded by the connections that the server takes."""


class SandboxTable:
    """All sandboxes of one service, each its owner's alone. Lives on one event loop."""

    def __init__(self, backend: Backend, limits: SandboxLimits) -> None:
        self._backend = backend
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._starters = ThreadPoolExecutor(limits.max_starting, "ropewalk-sandbox-start")
        self._helpers = ThreadPoolExecutor(_HELPERS, "ropewalk-sandbox")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._entries)

    # These raise SandboxRefusalError: the caller has no sandbox of this name, or what it asks for is not allowed.

    def create(self, owner: str, spec: SandboxSpec) -> RemoteSandbox:
        """Begin to start a sandbox."""
        if self._closing:
            raise SandboxRefusalError(
                503, "stopping", "expected a service that runs, got one that is stopping"
            )
        spec = self._limits.admit(spec)
        self._require_room(owner)
        provider = self._backend(spec)
        now = asyncio.get_running_loop().time()
        entry = _Entry(token_hex(12), owner, provider, now + spec.lease_s)
        self._entries[entry.id] = entry
        self._keep_reaping()
        entry.job = self._starters.submit(_started, entry)
        entry.starting = self._task(self._start(entry, entry.job), f"start of {entry.id}")
        return entry.told(now)

    async def get(self, owner: str, sandbox_id: str, wait_s: float) -> RemoteSandbox:
        """Tell of a sandbox, after a while where it is starting."""
        entry = self._entry(owner, sandbox_id)
        if wait_s > 0 and not entry.settled.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(entry.settled.wait(), wait_s)
        await self._look_at(entry)
        return entry.told(asyncio.get_running_loop().time())

    async def renew(self, owner: str, sandbox_id: str, lease_s: float) -> RemoteSandbox:
        """Let a sandbox live on, counted from now."""
        entry = self._entry(owner, sandbox_id)
        self._limits.admit_lease(lease_s)
        now = asyncio.get_running_loop().time()
        entry.expires = now + lease_s
        await self._look_at(entry)
        return entry.told(now)

    async def logs(self, owner: str, sandbox_id: str, size: int) -> str:
        """Return the last of what a sandbox has printed."""
        entry = self._entry(owner, sandbox_id)
        text = entry.output
        if entry.state is not SandboxState.ENDED:
            text = await self._helped(entry.provider.output)
        return text.encode()[-min(size, MAX_LOG_BYTES) :].decode(errors="replace")

    async def delete(self, owner: str, sandbox_id: str) -> None:
        """End a sandbox, and return when it is gone."""
        entry = self._entry(owner, sandbox_id)
        await asyncio.shield(self._end(entry, "it was deleted"))
        if entry.id in self._entries:
            raise SandboxRefusalError(
                503, "not_removed", f"expected to remove {entry.id}, got: {entry.reason}; it is tried again"
            )

    async def close(self, deadline_s: float) -> None:
        """End every sandbox, and take no further ones."""
        self._closing = True
        endings = [self._end(entry, "the service is stopping") for entry in self._entries.values()]
        if endings:
            await asyncio.wait(endings, timeout=deadline_s)
        if self._reaper is not None:
            self._reaper.cancel()
        if self._entries:
            logger.error("sandboxes left to whatever guards them: %s", ", ".join(sorted(self._entries)))
        self._starters.shutdown(wait=False, cancel_futures=True)
        self._helpers.shutdown(wait=False, cancel_futures=True)

    def _entry(self, owner: str, sandbox_id: str) -> _Entry:
        entry = self._entries.get(sandbox_id)
        if entry is None or entry.owner != owner or entry.doomed:
            raise SandboxRefusalError(
                404,
                "no_such_sandbox",
                f"expected a sandbox of yours, got {sandbox_id!r}; it ended, its lease ran out, or it never was",
            )
        return entry

    def _require_room(self, owner: str) -> None:
        of_owner = sum(entry.owner == owner for entry in self._entries.values())
        per_token = self._limits.max_sandboxes_per_token
        for count, cap, whose in (
            (len(self._entries), self._limits.max_sandboxes, ""),
            (of_owner, per_token, " of one token"),
        ):
            if cap is not None and count >= cap:
                raise SandboxRefusalError(
                    429,
                    "too_many_sandboxes",
                    f"expected at most {cap} sandboxes{whose}, got one more; delete one, or come back",
                    RETRY_AFTER_S,
                )

    async def _start(self, entry: _Entry, job: "Future[_Start]") -> None:
        """Wait for a start, and note what became of it."""
        await asyncio.wait([asyncio.wrap_future(job)])
        if job.cancelled() or entry.doomed:
            return
        outcome = job.result()
        if not isinstance(outcome, BaseException):
            entry.state, entry.url = SandboxState.RUNNING, outcome
            entry.settled.set()
            return
        if not isinstance(outcome, OpenEnvError):
            logger.error("sandbox %s could not be started", entry.id, exc_info=outcome)
        output = outcome.output if isinstance(outcome, ServerStartError) else ""
        entry.over(str(outcome).partition("\n--- ")[0], output)
        await self._swept(entry)

    async def _look_at(self, entry: _Entry) -> None:
        """Note the end of a sandbox that has ended by itself, and take away what is left of it."""
        if entry.state is not SandboxState.RUNNING or entry.doomed:
            return
        if await self._helped(lambda: entry.provider.alive) or entry.state is not SandboxState.RUNNING:
            return
        output = await self._helped(entry.provider.output)
        entry.over("its server has ended", output)
        await self._swept(entry)

    async def _swept(self, entry: _Entry) -> None:
        try:
            await self._helped(entry.provider.stop)
        except Exception as error:
            # Its deletion, or the end of its lease, tries again.
            logger.warning("what is left of sandbox %s could not be removed: %s", entry.id, error)

    def _end(self, entry: _Entry, reason: str) -> "asyncio.Task[None]":
        """Begin to remove a sandbox, unless that is under way."""
        if entry.ending is None or entry.ending.done():
            entry.doomed = True
            entry.ending = self._task(self._remove(entry, reason), f"end of {entry.id}")
        return entry.ending

    async def _remove(self, entry: _Entry, reason: str) -> None:
        entry.settled.set()  # whoever waits for its start is told
        try:
            await self._stopped(entry)
        except Exception as error:
            logger.warning("sandbox %s could not be removed, and will be: %s", entry.id, error)
            entry.over(str(error))
            entry.again = asyncio.get_running_loop().time() + RETRY_INTERVAL_S
            return
        entry.over(reason)
        self._entries.pop(entry.id, None)
        logger.info("sandbox %s is gone: %s", entry.id, reason)

    async def _stopped(self, entry: _Entry) -> None:
        if entry.job is None or entry.job.cancel():
            return  # nothing of it was ever made
        await self._helped(entry.provider.stop)
        if entry.starting is not None and not entry.starting.done():
            # The start may have begun just after that.
            await asyncio.wait([entry.starting])
            await self._helped(entry.provider.stop)

    def _keep_reaping(self) -> None:
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.create_task(self._reap(), name="reaper of sandboxes")
            self._reaper.add_done_callback(self._reaper_ended)

    def _reaper_ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("the reaper of sandboxes has died; another takes over", exc_info=error)
            asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, self._keep_reaping)

    async def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        while self._entries:
            await asyncio.sleep(POLL_INTERVAL_S)
            now = loop.time()
            for entry in list(self._entries.values()):
                if (entry.doomed and now >= entry.again) or now >= entry.expires:
                    self._end(entry, "its lease ran out")

    def _task(self, work: Any, name: str) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _helped(self, fn: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._helpers, fn)


def _started(entry: _Entry) -> _Start:
    """Start a sandbox, in a thread; an error is an outcome as well, which nobody may come to look at."""
    try:
        return None if entry.doomed else entry.provider.start()
    except BaseException as error:
        return error
