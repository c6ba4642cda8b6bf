"""What commands of a task run in: a process sandbox, or a container. The policy has one, and the verifier another."""

import asyncio
import io
import posixpath
import tarfile
import threading
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from openenv_core.errors import EngineRefusedError, OpenEnvError
from openenv_core.images.engine import BuildRequest, build_image
from openenv_core.providers.docker.container import Container, start_container
from openenv_core.providers.docker.engine import DockerEngine
from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.sandbox import Execution, FileRefusedError, Isolation, Limits, Sandbox, SandboxConfig
from openenv_core.sandbox.sandbox import SandboxSession

from ..models import Status
from ..tasks import WORKDIR, EnvironmentTable, HarborTask, InvalidTaskError, compute_digest

OUTPUT_BYTES: Final = 64 << 10
"""What is kept of a command's output."""

OUTPUT_HARD_BYTES: Final = 8 << 20
"""What a command may write before it is ended."""

ARCHIVE_BYTES: Final = 64 << 20
"""What a file or folder may hold that is taken out of a machine: what an engine's answer is read up to."""

MEMORY_MB: Final = 2048
DISK_MB: Final = 256
PROCESSES: Final = 512
"""What a machine gets where its task does not say, and the most processes of any."""

CALL_TIMEOUT_S: Final = 60.0
"""For what this module itself does in a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command, or of an action on a file; see `HarborObservation`."""

    status: Status = "ok"
    output: str = ""
    cut: bool = False
    exit_code: int | None = None
    reason: str | None = None


class TransferError(Exception):
    """A file or folder cannot be taken out of a machine, or put into it, which is not the infrastructure's fault."""


class Machine(Protocol):
    """One place to run commands in. Where the infrastructure fails, its methods raise `OpenEnvError` or OSError."""

    workdir: str

    async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        """Run a command in a shell. After a time-out, or too much output, nothing runs any more."""

    async def end(self) -> None:
        """End all that runs, for good: files can be packed, and no command be run."""

    async def pack(self, path: str) -> bytes | None:
        """Return a file or folder as a tar archive; None where there is none. TransferError: it is too large."""

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        """Put what was packed in the place of a path, or add it there. TransferError: something is in its way."""

    async def close(self) -> None:
        """Release it. Idempotent."""


_SESSION_CODE: Final = """
import os, shutil, signal, subprocess, sys, tarfile

for _name in ("app", "tests", "solution", "logs/agent", "logs/artifacts", "logs/verifier"):
    os.makedirs(_name, exist_ok=True)
_path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
_variables = {**os.environ, "PATH": _path, "HOME": "/tmp", "TMPDIR": "/tmp"}

def run(command, variables):
    argv, environ = ["/bin/bash", "-c", command], {**_variables, **variables}
    process = subprocess.Popen(argv, cwd="/app", env=environ, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:
        end()
        process.wait()
        raise

def end():
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass

def pack(path):
    if not os.path.lexists(path):
        return False
    with tarfile.open(".tmp/packed", "w") as archive:
        archive.add(path, arcname=os.path.basename(path))
    return True

def unpack(path, replace):
    if replace:
        shutil.rmtree(path, ignore_errors=True)
    above = os.path.dirname(path) or "."
    os.makedirs(above, exist_ok=True)
    with tarfile.open(".tmp/unpacked") as archive:
        archive.extractall(above, filter="data")
    os.makedirs("app", exist_ok=True)
"""
"""What a session's interpreter, which runs nothing else, is told first."""

_WORKSPACE_FOLDERS: Final = {
    "app": "app",
    "tests": "tests",
    "solution": "solution",
    "logs": "logs",
    "tmp": ".tmp",
}
"""Where in the workspace that is which tasks name by absolute paths."""


class _SandboxMachine:
    """A session of the process sandbox."""

    workdir = WORKDIR

    def __init__(self, session: SandboxSession, variables: Mapping[str, str]) -> None:
        self._session, self._variables = session, variables

    @classmethod
    async def open(
        cls, sandbox: Sandbox, table: EnvironmentTable, variables: Mapping[str, str]
    ) -> "_SandboxMachine":
        disk_bytes = (table.storage_mb or DISK_MB) << 20
        limits = Limits(
            timeout_s=86_400.0,
            grace_s=2.0,
            memory_bytes=(table.memory_mb or MEMORY_MB) << 20,
            output_bytes=OUTPUT_BYTES,
            output_hard_bytes=OUTPUT_HARD_BYTES,
            file_bytes=disk_bytes,
            disk_bytes=disk_bytes,
            files=65_536,
            open_files=256,
            processes=PROCESSES,
            allow_subprocess=True,
        )
        session = await sandbox.open(limits)
        try:
            _require_ok(await session.execute(_SESSION_CODE, timeout_s=CALL_TIMEOUT_S))
        except BaseException:
            await session.close()
            raise
        return cls(session, variables)

    async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        result = await self._session.call(
            "run", (command, {**self._variables, **variables}), timeout_s=timeout_s
        )
        execution = result.execution
        status: Status = "ok"
        if execution.status == "sandbox_error":
            _require_ok(execution)
        elif execution.state_lost or (execution.status == "ok") != isinstance(result.value, int):
            status = "killed"
        elif execution.status in ("timeout", "output_limit"):
            status = "timeout" if execution.status == "timeout" else "output_limit"
            await self._session.execute("")  # takes what was written on the way to the end
        elif execution.status != "ok":
            status = "refused"  # the shell did not begin: too many processes, no working folder
        code = result.value if isinstance(result.value, int) else None
        return CommandResult(
            status=status,
            output=execution.stdout + execution.stderr,
            cut=execution.cut.stdout or execution.cut.stderr,
            exit_code=128 - code if code is not None and code < 0 else code,
            reason=execution.reason
            or (None if execution.error is None else execution.error.evalue or execution.error.ename),
        )

    async def end(self) -> None:
        _require_ok((await self._session.call("end", timeout_s=CALL_TIMEOUT_S)).execution)

    async def pack(self, path: str) -> bytes | None:
        if (inside := self._workspace_path(path)) is None:
            return None
        if not await self._transfer("pack", inside):
            return None
        try:
            data = await self._session.get_file(".tmp/packed")
        except FileRefusedError as error:
            raise TransferError(str(error)) from None
        return _check_size(path, data)

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        if (inside := self._workspace_path(path)) is None:
            raise TransferError(
                f"{path}: expected a path below {', '.join(f'/{name}' for name in _WORKSPACE_FOLDERS)}"
            )
        try:
            await self._session.put_file(".tmp/unpacked", archive)
        except FileRefusedError as error:
            raise TransferError(str(error)) from None
        await self._transfer("unpack", inside, replace)

    async def close(self) -> None:
        await self._session.close()

    async def _transfer(self, function: str, *arguments: Any) -> Any:
        result = await self._session.call(function, arguments, timeout_s=CALL_TIMEOUT_S)
        if result.execution.status == "sandbox_error":
            _require_ok(result.execution)
        if result.execution.status != "ok":
            raise TransferError(f"{arguments[0]}: {_failure_reason(result.execution)}")
        return result.value

    def _workspace_path(self, path: str) -> str | None:
        first, _, rest = posixpath.join(self.workdir, path).strip("/").partition("/")
        return (
            posixpath.join(_WORKSPACE_FOLDERS[first], rest).rstrip("/")
            if first in _WORKSPACE_FOLDERS
            else None
        )


def _failure_reason(execution: Execution) -> str:
    message = None if execution.error is None else execution.error.evalue
    return execution.reason or message or execution.status


def _require_ok(execution: Execution) -> None:
    if execution.status != "ok":
        raise OpenEnvError(f"the sandbox failed: {_failure_reason(execution)}")


class _ContainerMachine:
    """A container without a server. All its calls block, and are made in threads."""

    def __init__(self, container: Container, engine: DockerEngine, workdir: str, user: str) -> None:
        self.workdir = workdir
        self._container, self._engine, self._user = container, engine, user
        self._shell = "sh"

    @classmethod
    def start(
        cls,
        image: str,
        table: EnvironmentTable,
        network: str,
        user: str | int | None,
        variables: Mapping[str, str],
    ) -> "_ContainerMachine":
        engine = DockerEngine.find()
        options = ContainerOptions(
            env_vars=variables,
            memory=f"{table.memory_mb or MEMORY_MB}m",
            cpus=table.cpus,
            pids=PROCESSES,
            network="none" if network == "no-network" else "bridge",
            gpus=table.gpus or None,
            # What a task's commands may do in Harbor: it is an ordinary container, of the engine's own defaults.
            tmpfs=(),
            read_only=False,
            cap_drop=(),
            no_new_privileges=False,
            init=False,
            # A shell reaps what is left over, and outlives `kill -9 -1`.
            command=("sh", "-c", "while :; do sleep 3600; done"),
        )
        container = start_container(image, options, engine=engine, serves=False)
        try:
            workdir = table.workdir or (engine.find_image(image) or {})["Config"].get("WorkingDir") or "/"
            self = cls(container, engine, workdir, "" if user is None else str(user))
            self._run_as_root(
                'mkdir -p "$0" /logs/agent /logs/artifacts /logs/verifier; chmod -R 777 /logs', workdir
            )
            self._shell = "bash" if self._run_as_root("command -v bash") == 0 else "sh"
        except BaseException:
            with suppress(OpenEnvError):
                container.remove()
            raise
        return self

    async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        return await asyncio.to_thread(self._run, command, timeout_s, variables)

    def _run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        try:
            result = self._engine.execute(
                self._container.id,
                (self._shell, "-c", command),
                timeout_s=timeout_s,
                most=OUTPUT_HARD_BYTES,
                User=self._user,
                WorkingDir=self.workdir,
                Env=[f"{name}={value}" for name, value in variables.items()],
            )
            if result.exit_code is None:
                self._run_as_root("kill -9 -1")
        except EngineRefusedError:
            state = self._container.end_state()
            if state.out_of_memory:
                return CommandResult(status="killed", reason=f"the container {state}")
            raise
        status: Status = (
            "ok" if result.exit_code is not None else "output_limit" if result.full else "timeout"
        )
        limits = {
            "output_limit": f"it wrote more than {OUTPUT_HARD_BYTES >> 20} MiB",
            "timeout": f"it ran longer than {timeout_s:g} s",
        }
        return CommandResult(
            status=status,
            output=result.output[:OUTPUT_BYTES].decode(errors="replace"),
            cut=len(result.output) > OUTPUT_BYTES,
            exit_code=result.exit_code,
            reason=limits.get(status),
        )

    async def end(self) -> None:
        try:
            await asyncio.to_thread(self._engine.call, "POST", f"/containers/{self._container.id}/kill")
        except EngineRefusedError as error:
            if error.status != 409:  # it does not run any more
                raise

    async def pack(self, path: str) -> bytes | None:
        path = posixpath.join(self.workdir, path)
        try:
            return _check_size(path, await asyncio.to_thread(self._engine.archive, self._container.id, path))
        except EngineRefusedError as error:
            if error.status == 404:
                return None
            raise

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        await asyncio.to_thread(self._unpack, posixpath.join(self.workdir, path), archive, replace=replace)

    def _unpack(self, path: str, archive: bytes, *, replace: bool) -> None:
        parent = posixpath.dirname(path)
        if replace:
            self._run_as_root('rm -rf -- "$0"', path)
        try:
            if self._run_as_root('mkdir -p -- "$0"', parent) != 0:
                raise TransferError(f"{path}: there can be no folder {parent}")
            self._engine.put_archive(self._container.id, parent, archive)
        except EngineRefusedError as error:
            raise TransferError(f"{path}: {error.reason}") from error
        finally:
            self._run_as_root('mkdir -p -- "$0"', self.workdir)  # it may be what was replaced

    async def close(self) -> None:
        await asyncio.to_thread(self._container.remove)

    def _run_as_root(self, command: str, *arguments: str) -> int | None:
        argv = ("sh", "-c", command, *arguments)
        result = self._engine.execute(
            self._container.id, argv, timeout_s=CALL_TIMEOUT_S, most=OUTPUT_BYTES, User="0", WorkingDir="/"
        )
        return result.exit_code


def _check_size(path: str, archive: bytes) -> bytes:
    if len(archive) >= ARCHIVE_BYTES:
        raise TransferError(f"{path} has more than {ARCHIVE_BYTES >> 20} MiB")
    return archive


def pack_folder(folder: Path, path: str) -> bytes:
    """Return a folder of this machine as an archive that can be unpacked at a path, as root's."""

    def set_root_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=posixpath.basename(path), filter=set_root_owner)
    return buffer.getvalue()


def read_packed_file(archive: bytes) -> bytes | None:
    """Return the content of the plain file that an archive holds; None where it holds something else."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.next()
        file = tar.extractfile(member) if member is not None and member.isreg() else None
        return None if file is None else file.read(ARCHIVE_BYTES)


@dataclass(slots=True)
class _LoopSandbox:
    """The sandbox of one event loop."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sandbox: Sandbox | None = None


class Machines:
    """Opens machines. One object may be shared by all sessions of a server."""

    def __init__(self) -> None:
        self._sandboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopSandbox] = (
            weakref.WeakKeyDictionary()
        )
        self._build_lock = threading.Lock()

    async def open(self, task: HarborTask, *, verifier: bool) -> Machine:
        """Open a machine for a phase of a task.

        Raises:
            OpenEnvError: It cannot be had: there is no engine, no such image, no sandbox of the level `namespaces`.
        """
        config = task.config
        phase = config.verifier if verifier else config.agent
        table, image = config.environment, task.image
        if verifier:
            table, image = config.verifier.environment or table, task.verifier_image or image
        variables = task.variables(table.env)
        if task.kind == "process":
            return await _SandboxMachine.open(await self.sandbox(), table, variables)
        name = image if isinstance(image, str) else await asyncio.to_thread(self._build, image, task)
        settings = (name, table, phase.network_mode or table.network_mode, phase.user, variables)
        # Where the caller goes away meanwhile, the container ends with the object, which nobody holds.
        return await asyncio.to_thread(_ContainerMachine.start, *settings)

    async def sandbox(self) -> Sandbox:
        """Return the sandbox of this event loop, started."""
        loop_sandbox = self._get_loop_sandbox()
        async with loop_sandbox.lock:
            if loop_sandbox.sandbox is None:
                links = tuple(name for name in _WORKSPACE_FOLDERS if name != "tmp")
                sandbox = Sandbox(SandboxConfig(minimum=Isolation.NAMESPACES, links=links))
                await sandbox.start()
                loop_sandbox.sandbox = sandbox
            return loop_sandbox.sandbox

    async def close(self) -> None:
        """End the sandbox of this event loop. Idempotent."""
        loop_sandbox = self._get_loop_sandbox()
        async with loop_sandbox.lock:
            sandbox, loop_sandbox.sandbox = loop_sandbox.sandbox, None
            if sandbox is not None:
                await sandbox.close()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Close the sandbox when the server ends."""
        try:
            yield
        finally:
            await self.close()

    def _get_loop_sandbox(self) -> _LoopSandbox:
        return self._sandboxes.setdefault(asyncio.get_running_loop(), _LoopSandbox())

    def _build(self, folder: Path, task: HarborTask) -> str:
        """Build an image, unless there is one of that content, and return its name."""
        tag = f"ropewalk-harbor:{compute_digest(folder)}"
        with self._build_lock:
            if not DockerEngine.find().has_image(tag):
                if not (folder / "Dockerfile").is_file():
                    raise InvalidTaskError(f"{task.folder}: expected {folder.name}/Dockerfile, got none")
                limit_s = task.config.environment.build_timeout_sec
                build_image(
                    BuildRequest(context=folder, dockerfile="Dockerfile", tags=(tag,), timeout_s=limit_s)
                )
        return tag
