"""The sandbox: a zygote, the sessions that were forked from it, and who looks after both."""

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import site
import socket
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.config import LADDER, Isolation, Limits, SandboxConfig
from openenv_core.sandbox.errors import SandboxClosedError, SandboxUnavailableError
from openenv_core.sandbox.kernel import cgroups
from openenv_core.sandbox.kernel.cgroups import CgroupMaker
from openenv_core.sandbox.kernel.identity import session_uid
from openenv_core.sandbox.probes import prove
from openenv_core.sandbox.scratch import Scratch
from openenv_core.sandbox.session import Life, SandboxSession
from openenv_core.sandbox.zygote import Birth, Zygote

_NAME: Final = "\0ropewalk-sandbox-user-{uid}"
"""Of an abstract socket, which the kernel gives to one process at a time, and takes from one that dies."""


class SandboxSlots:
    """The slots that one sandbox has taken.

    The kernel counts processes by user, and lets a user signal its own: two sandboxes must not share one. Where
    sessions have no users of their own, slots are numbers, and nobody else's business.
    """

    def __init__(self) -> None:
        self._taken: dict[int, socket.socket | None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self) -> int:
        """Take the first slot that nobody on this machine has.

        Raises:
            ConfigurationError: The kernel has no such sockets.
        """
        for slot in itertools.count():
            if slot in self._taken:
                continue
            if (uid := session_uid(slot)) is None:
                self._taken[slot] = None
                return slot
            lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lease.bind(_NAME.format(uid=uid))
            except OSError as error:
                lease.close()
                if error.errno != errno.EADDRINUSE:
                    raise ConfigurationError(
                        f"expected to lease a user for a session, got: {error}; sandboxes of root need Linux"
                    ) from error
                continue
            self._taken[slot] = lease
            return slot
        raise AssertionError("numbers do not end")

    def give(self, slot: int) -> None:
        """Give a slot back."""
        if (lease := self._taken.pop(slot, None)) is not None:
            lease.close()


SYSTEM: Final = (
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
)

OURS: Final = (
    "openenv_core",
    "servers",
    "envs",
    "rl_bridge",
    "dockerfiles",
    "examples",
    "benchmarks",
    "tests",
    "code_interpreter_env",
)
"""Packages that hold what no solution may see: tasks with their tests, and how they are judged."""


@dataclass(frozen=True, slots=True)
class ReadableView:
    """What code may read.

    Attributes:
        shown: Files and folders that may be read, with all below.
        hidden: What may not, below one of these.
    """

    shown: tuple[str, ...]
    hidden: tuple[str, ...]

    def without_hidden(self) -> tuple[str, ...]:
        """Return the same as files and folders none of which holds a hidden one: their other entries instead."""
        away = {Path(path) for path in self.hidden}
        return tuple(str(found) for path in self.shown for found in _without(Path(path), away))


def view_of(more: Iterable[Path] = (), hidden: Iterable[Path] = ()) -> ReadableView:
    """Return what code may read of this machine.

    Args:
        more: Beside Python's and the system's.
        hidden: Not to be read, beside this project's own packages.
    """
    python = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    wanted = {path for path in (*map(Path, SYSTEM), *python, *more) if path.exists()}
    shown = [
        path for path in wanted if not any(path != other and path.is_relative_to(other) for other in wanted)
    ]
    away = {path.resolve() for path in hidden if path.exists()} | _own_packages()
    below = [path for path in away if any(path.is_relative_to(other.resolve()) for other in shown)]
    return ReadableView(tuple(sorted(map(str, shown))), tuple(sorted(map(str, below))))


def _own_packages() -> set[Path]:
    own = {folder / name for folder in _places() for name in OURS}
    return {path.resolve() for path in own if path.exists()}


def _places() -> set[Path]:
    """Return where packages are installed, here and beneath a virtual environment, and where these ones lie."""
    beneath = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    paths = [*site.getsitepackages(prefixes), *sysconfig.get_paths().values()]
    for scheme in sysconfig.get_scheme_names():
        paths += sysconfig.get_paths(scheme, beneath).values()
    # A checkout, or what an editable installation points to, may lie below a folder that is shown.
    return {*map(Path, paths), Path(__file__).resolve().parents[2]}


def _without(path: Path, away: set[Path]) -> list[Path]:
    real = path.resolve()
    if any(real.is_relative_to(other) for other in away):
        return []
    if not any(other.is_relative_to(real) for other in away):
        return [path]
    if path.is_symlink():
        return []  # the folder that it leads to is there under its own name, or it is not to be seen
    return [found for entry in sorted(path.iterdir()) for found in _without(entry, away)]


logger = logging.getLogger("openenv_core.sandbox")

BACKOFF_S: Final = (0.0, 0.1, 0.5, 2.0, 10.0)
"""Seconds before a zygote that died is replaced: the first at once, the following ever later."""

HEALTHY_UPTIME_S: Final = 60.0
"""A zygote that lived so long begins the count of deaths anew."""


class Sandbox:
    """Interpreters for code that nobody has read.

    Example:
        async with Sandbox(SandboxConfig(preload=("numpy",))) as sandbox:
            session = await sandbox.open()
            done = await session.execute("1 + 1")
            assert done.result == "2"

    Everything belongs to the event loop that it was started on. It never blocks that loop.

    Args:
        config: How interpreters are made.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config or SandboxConfig()
        self._isolation: Isolation | None = None
        self._facts: Mapping[str, Any] = {}
        self._zygote: Zygote | None = None
        self._scratch: Scratch | None = None
        self._cgroups: CgroupMaker | None = None
        self._sessions: set[SandboxSession] = set()
        self._slots = SandboxSlots()
        self._numbers = itertools.count(1)
        self._booting = asyncio.Lock()
        self._began = 0.0
        self._deaths = 0
        self._proved = False
        self._closed = False

    @property
    def isolation(self) -> Isolation:
        """The rung of the ladder that the self-test has proved.

        Raises:
            SandboxClosedError: It was not started.
        """
        if self._isolation is None:
            raise SandboxClosedError(
                "expected a running sandbox, got one that was not started; await start() first"
            )
        return self._isolation

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the zygote says of itself: its version of Python, the kernel's version of Landlock."""
        return self._facts

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    @property
    def zygote_pid(self) -> int | None:
        """Of the process that interpreters are forked from; None where there is none just now."""
        return None if self._zygote is None or self._zygote.gone else self._zygote.pid

    async def start(self) -> None:
        """Find the strongest rung of the ladder that holds here, by trying.

        Raises:
            SandboxUnavailableError: None does, at or above the minimum.
            ConfigurationError: A module that is to be imported cannot be.
        """
        _raise_descriptor_limit()
        self._cgroups = await asyncio.to_thread(cgroups.find)
        config, refusals = self._config, []
        first, last = LADDER.index(config.strongest), LADDER.index(config.minimum)
        for isolation in LADDER[first : last + 1]:
            self._isolation = isolation
            try:
                await self._boot()
                await prove(isolation, self.open)
            except SandboxUnavailableError as error:
                refusals.append(f"{isolation}: {error}")
                await self._unboot()
                continue
            except BaseException:
                await self._unboot()
                raise
            self._proved = True
            if refusals:
                logger.info("code runs at the level %s; %s", isolation, "; ".join(refusals))
            return
        self._isolation = None
        raise SandboxUnavailableError(
            f"expected isolation of at least {config.minimum}, and no such level holds here; {'; '.join(refusals)}. "
            "docs/sandbox.md says what each level needs"
        )

    async def open(self, limits: Limits | None = None, *, snapshot: bool = False) -> SandboxSession:
        """Start an interpreter.

        Args:
            limits: Its bounds.
            snapshot: Keeps the state of before an execution that had to be killed.

        Raises:
            SandboxUnavailableError: None can be had now.
            SandboxClosedError: The sandbox was closed, or not started.
        """
        session = self._make(limits or Limits(), snapshot=snapshot)
        try:
            await session.begin()
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End every session and the zygote. Idempotent."""
        self._closed = True
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        await self._unboot()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _make(self, limits: Limits, *, snapshot: bool) -> SandboxSession:
        isolation = self.isolation

        async def start() -> Life:
            return await self._fork_interpreter(limits, snapshot)

        def adopt(limits: Limits, life: Life) -> SandboxSession:
            other = self._make(limits, snapshot=snapshot)
            other.take_over(life)
            return other

        session = SandboxSession(uuid4().hex, limits, isolation, start, self._sessions.discard, adopt)
        self._sessions.add(session)
        return session

    async def _fork_interpreter(self, limits: Limits, snapshot: bool) -> Life:
        if self._closed:
            raise SandboxClosedError("expected an open sandbox, got one that was closed; make another")
        zygote = await self._living_zygote()
        birth = Birth(zygote, self._scratch, self._cgroups, limits)
        slot = self._slots.take()
        try:
            worker, workspace = await birth.fork_interpreter(
                next(self._numbers), slot, self._config.start_timeout_s, snapshot=snapshot
            )
        except BaseException:
            self._slots.give(slot)
            raise
        # Not with the session: branches of it are the same user, and may live on.
        workspace.gone = partial(self._slots.give, slot)
        return worker, workspace

    async def _living_zygote(self) -> Zygote:
        async with self._booting:
            if self._zygote is None or self._zygote.gone:
                await self._unboot_zygote()
                if asyncio.get_running_loop().time() - self._began > HEALTHY_UPTIME_S:
                    self._deaths = 0
                await asyncio.sleep(BACKOFF_S[min(self._deaths, len(BACKOFF_S) - 1)])
                self._deaths += 1
                await self._boot_zygote()
        assert self._zygote is not None
        return self._zygote

    async def _boot(self) -> None:
        if self.isolation is not Isolation.NAMESPACES:
            self._scratch = await asyncio.to_thread(Scratch)
        await self._boot_zygote()

    async def _boot_zygote(self) -> None:
        config = self._config
        view = await asyncio.to_thread(view_of, config.readable, config.hidden)
        # A root of its own has empty places instead of the hidden ones; a few mounts do for it.
        bound = self.isolation is Isolation.NAMESPACES
        told = {
            "isolation": self.isolation,
            "preload": list(config.preload),
            "shown": view.shown,
            "hidden": view.hidden,
            "readable": view.shown if bound else await asyncio.to_thread(view.without_hidden),
            "scratch": None if self._scratch is None else str(self._scratch.path),
            "privileged": session_uid(0) is not None,
        }
        self._began = asyncio.get_running_loop().time()
        self._zygote = Zygote(told, self._on_death)
        self._facts = await self._zygote.start(config.boot_timeout_s)

    def _on_death(self) -> None:
        # On the way down the ladder it is no news.
        if self._proved and not self._closed:
            logger.warning(
                "the process that interpreters are forked from has ended; the next session starts another"
            )

    async def _unboot(self) -> None:
        await self._unboot_zygote()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            await asyncio.to_thread(scratch.close)

    async def _unboot_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()


def _raise_descriptor_limit() -> None:
    # A session has half a dozen descriptors, and the usual soft limit is 1024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
