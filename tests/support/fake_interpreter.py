"""Fakes of interpreter and backend, for failures that real ones do not produce on demand: deaths, refusals to start."""

import asyncio
from dataclasses import dataclass, field
from hashlib import sha256

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    Execution,
    FileInfo,
    FileRefusedError,
    Interpreter,
    Limits,
    SandboxUnavailableError,
)


@dataclass
class FakeInterpreter:
    """Answers each execution with their count; the code `lose` kills it, and `hang` never ends.

    A gate delays its closing.
    """

    session_id: str
    limits: Limits
    packages: tuple[str, ...] = ()
    snapshot: bool = False
    isolation: str = "lsm"
    closed: bool = False
    broken: bool = False
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None
    count: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, float | None, str | None]] = field(default_factory=list)

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        self._check()
        self.asked.append((code, timeout_s, stdin))
        self.count += 1
        known = {"session_id": self.session_id, "isolation": self.isolation, "execution_count": self.count}
        if code == "hang":
            await asyncio.Event().wait()
        if code == "lose":
            self.files = {}
            return Execution(status="killed", exit_code=137, state_lost=True, signal=9, **known)  # type: ignore[arg-type]
        return Execution(status="ok", stdout=f"{code}\n", result=repr(self.count), **known)  # type: ignore[arg-type]

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        self._check()
        if path.startswith("/") or ".." in path:
            raise FileRefusedError(path, "it leaves the workspace")
        self.files[path] = data
        return FileInfo(path=path, size=len(data), sha256=sha256(data).hexdigest())

    async def get_file(self, path: str) -> bytes:
        self._check()
        if path not in self.files:
            raise FileRefusedError(path, "there is none")
        return self.files[path]

    async def list_files(self) -> list[FileInfo]:
        return [await self.put_file(path, data) for path, data in sorted(self.files.items())]

    async def restart(self) -> None:
        self._check()
        self.count, self.files = 0, {}

    async def close(self) -> None:
        self.closing.set()
        if self.gate is not None:
            await self.gate.wait()
        self.closed = True

    def _check(self) -> None:
        assert not self.closed, "expected an open interpreter"
        if self.broken:
            raise SandboxUnavailableError("expected a machine that works, got this one")


@dataclass
class FakeBackend:
    """Opens fake interpreters, and keeps them for the test to inspect."""

    isolation: str = "lsm"
    refusing: bool = False
    refuses_to_start: bool = False
    snapshots: bool = True
    started: int = 0
    closed: int = 0
    opened: list[FakeInterpreter] = field(default_factory=list)

    async def start(self) -> None:
        if self.refuses_to_start:
            raise SandboxUnavailableError("expected a kernel with walls, got one without")
        self.started += 1

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> Interpreter:
        assert self.started > self.closed, "expected a started backend"
        if self.refusing:
            raise SandboxUnavailableError("expected a free place, got none")
        if snapshot and not self.snapshots:
            raise ConfigurationError("expected no snapshot, this backend has none; leave it out")
        one = FakeInterpreter(str(len(self.opened)), limits, packages, snapshot, self.isolation)
        self.opened.append(one)
        return one

    async def close(self) -> None:
        self.closed += 1
