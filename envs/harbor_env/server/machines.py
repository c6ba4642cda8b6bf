"""The machines that a task's commands run in: a process sandbox or a container, separate for policy and verifier."""

import asyncio
import io
import platform
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
from openenv_core.providers.docker.container import Container, PinnedImage, start_container
from openenv_core.providers.docker.engine import DockerEngine
from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.sandbox import (
    Execution,
    FileRefusedError,
    Isolation,
    Limits,
    Sandbox,
    SandboxConfig,
    SandboxUnavailableError,
)
from openenv_core.sandbox.sandbox import SandboxSession

from ..models import Status
from ..tasks import WORKDIR, EnvironmentTable, HarborTask, InvalidTaskError, compute_digest

OUTPUT_BYTES: Final = 64 << 10
"""How much of a command's output is kept."""

OUTPUT_HARD_BYTES: Final = 8 << 20
"""How much a command may write before it is killed."""

ARCHIVE_BYTES: Final = 64 << 20
"""The maximum size of a file or folder copied out of a machine, and of the engine's response that is read for it."""

MEMORY_MB: Final = 2048
DISK_MB: Final = 256
PROCESSES: Final = 512
"""The default memory and disk of a machine, and the maximum number of processes in any machine."""

CALL_TIMEOUT_S: Final = 60.0
"""The timeout of this module's own operations in a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command, or of an action on a file; see `HarborObservation`."""

    status: Status = "ok"
    output: str = ""
    cut: bool = False
    exit_code: int | None = None
    reason: str | None = None


class TransferError(Exception):
    """A file or folder cannot be copied out of a machine or into it, through no fault of the infrastructure."""


class Machine(Protocol):
    """A machine to run commands in. Its methods raise OpenEnvError or OSError if the infrastructure fails."""

    workdir: str

    async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        """Run a shell command. On a timeout or too much output, all processes in the machine are killed."""

    async def end(self) -> None:
        """Kill all processes. Afterwards files can still be packed, but no commands can be run.

        Raises:
            TransferError: One of them has brought down the machine.
        """

    async def pack(self, path: str) -> bytes | None:
        """Return a file or folder as a tar archive; None if it does not exist.

        Raises:
            TransferError: It is too large.
        """

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        """Unpack an archive at a path, replacing what is there or adding to it.

        Raises:
            TransferError: The path is not allowed, or something is in the way.
        """

    async def close(self) -> None:
        """Release the machine. Idempotent."""


_SESSION_CODE: Final = """
import os, shutil, signal, subprocess, sys, tarfile, time

if not os.path.exists("/dev/fd"):  # scripts that use <(...) would go wrong
    raise OSError("no /dev/fd: a container around this server hides parts of /proc; see docs/harbor.md")
for _name in ("app", "tests", "solution", "logs/agent", "logs/artifacts", "logs/verifier", "dev/shm"):
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
    while True:  # until none is left: the end of one that is late would send signals to this process
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pass
        time.sleep(0.001)

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
"""The functions that a session's interpreter defines first; it runs no other code."""

_WORKSPACE_FOLDERS: Final = {
    "app": "app",
    "tests": "tests",
    "solution": "solution",
    "logs": "logs",
    "tmp": ".tmp",
}
"""The folder of the workspace for each top-level folder that tasks refer to by absolute paths."""


class _SandboxMachine:
    """A machine that is a session of the process sandbox."""

    workdir = WORKDIR

    def __init__(self, session: SandboxSession, variables: Mapping[str, str]) -> None:
        self._session, self._variables = session, variables
        self._has_processes = False  # of the task: whatever a command has left behind

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
        self._has_processes = True
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
            await self._session.execute("")  # discard output written while the command was being killed
        elif execution.status != "ok":
            status = "refused"  # the shell did not start: too many processes, or no working directory
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
        await self._transfer("end")
        self._has_processes = False

    async def pack(self, path: str) -> bytes | None:
        if (real_path := self._workspace_path(path)) is None:
            return None
        if not await self._transfer("pack", real_path):
            return None
        try:
            data = await self._session.get_file(".tmp/packed")
        except FileRefusedError as error:
            raise TransferError(str(error)) from None
        return _check_size(path, data)

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        if (real_path := self._workspace_path(path)) is None:
            raise TransferError(
                f"{path}: expected a path below {', '.join(f'/{name}' for name in _WORKSPACE_FOLDERS)}"
            )
        try:
            await self._session.put_file(".tmp/unpacked", archive)
        except FileRefusedError as error:
            raise TransferError(str(error)) from None
        await self._transfer("unpack", real_path, replace)

    async def close(self) -> None:
        await self._session.close()

    async def _transfer(self, function: str, *arguments: Any) -> Any:
        result = await self._session.call(function, arguments, timeout_s=CALL_TIMEOUT_S)
        status = result.execution.status
        if status == "sandbox_error" or (status == "killed" and not self._has_processes):
            _require_ok(result.execution)
        if status != "ok":
            raise TransferError(f"{(*arguments, function)[0]}: {_failure_reason(result.execution)}")
        return result.value

    def _workspace_path(self, path: str) -> str | None:
        top_folder, _, rest = posixpath.join(self.workdir, path).strip("/").partition("/")
        return (
            posixpath.join(_WORKSPACE_FOLDERS[top_folder], rest).rstrip("/")
            if top_folder in _WORKSPACE_FOLDERS
            else None
        )


def _failure_reason(execution: Execution) -> str:
    message = None if execution.error is None else execution.error.evalue
    return execution.reason or message or execution.status


def _require_ok(execution: Execution) -> None:
    if execution.status != "ok":
        raise OpenEnvError(f"the sandbox failed: {_failure_reason(execution)}")


class _ContainerMachine:
    """A machine that is a container without a server. Calls to the engine block, so they run in threads."""

    def __init__(self, container: Container, engine: DockerEngine, workdir: str, user: str) -> None:
        self.workdir = workdir
        self._container, self._engine, self._user = container, engine, user
        self._shell = "sh"

    @classmethod
    def start(
        cls,
        image: PinnedImage,
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
            # Same permissions as in Harbor: an ordinary container with the engine's defaults.
            tmpfs=(),
            read_only=False,
            cap_drop=(),
            no_new_privileges=False,
            init=False,
            # As PID 1, a shell reaps orphans and survives `kill -9 -1`.
            command=("sh", "-c", "while :; do sleep 3600; done"),
        )
        image_id = image.id(engine)
        container = start_container(image.name, options, engine=engine, image_id=image_id, serves=False)
        try:
            workdir = table.workdir or (engine.find_image(image_id) or {})["Config"].get("WorkingDir") or "/"
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
            if error.status != 409:  # 409: the container is not running
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
            self._run_as_root('mkdir -p -- "$0"', self.workdir)  # the path may be the working directory

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
    """Return a folder of the host as an archive, owned by root, to unpack at a path."""

    def set_root_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=posixpath.basename(path), filter=set_root_owner)
    return buffer.getvalue()


def read_packed_file(archive: bytes) -> bytes | None:
    """Return the content of the regular file in an archive; None if the archive holds something else."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        member = tar.next()
        file = tar.extractfile(member) if member is not None and member.isreg() else None
        return None if file is None else file.read(ARCHIVE_BYTES)


@dataclass(slots=True)
class _LoopSandbox:
    """The sandbox of one event loop."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sandbox: Sandbox | None = None


class Machines:
    """Opens machines. All sessions of a server can share one instance.

    All containers of an image's name are of one image: policies of a group, and their verifiers, do not differ in it.
    """

    def __init__(self) -> None:
        self._sandboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopSandbox] = (
            weakref.WeakKeyDictionary()
        )
        self._build_lock = threading.Lock()
        self._images: dict[str, PinnedImage] = {}

    async def open(self, task: HarborTask, *, verifier: bool) -> Machine:
        """Open a machine for the policy's or the verifier's phase of a task.

        Raises:
            OpenEnvError: There is no engine, no such image, or no sandbox of the level `namespaces`.
        """
        config = task.config
        phase = config.verifier if verifier else config.agent
        table, image = config.environment, task.image
        if verifier:
            table, image = config.verifier.environment or table, task.verifier_image or image
        variables = task.variables(table.env)
        if task.kind == "process":
            return await _SandboxMachine.open(await self.sandbox(), table, variables)
        if isinstance(image, str):
            pinned = self._images.setdefault(image, PinnedImage(image))
        else:
            pinned = PinnedImage(await asyncio.to_thread(self._build, image, task))
        settings = (pinned, table, phase.network_mode or table.network_mode, phase.user, variables)
        # If this call is cancelled meanwhile, the container ends once its unreferenced object is collected.
        return await asyncio.to_thread(_ContainerMachine.start, *settings)

    async def sandbox(self) -> Sandbox:
        """Return the started sandbox of this event loop.

        Raises:
            SandboxUnavailableError: This machine, or this Python, cannot isolate tasks without an image.
        """
        loop_sandbox = self._get_loop_sandbox()
        async with loop_sandbox.lock:
            if loop_sandbox.sandbox is None:
                if not hasattr(tarfile, "data_filter"):  # what the policy packed is unpacked beside the tests
                    raise SandboxUnavailableError(
                        f"tasks without an image need Python 3.11.4 or newer, got {platform.python_version()}: "
                        "older ones cannot unpack archives of untrusted code safely"
                    )
                links = (*(name for name in _WORKSPACE_FOLDERS if name != "tmp"), "dev/shm")
                sandbox = Sandbox(SandboxConfig(minimum=Isolation.NAMESPACES, links=links))
                await sandbox.start()
                loop_sandbox.sandbox = sandbox
            return loop_sandbox.sandbox

    async def close(self) -> None:
        """Close the sandbox of this event loop. Idempotent."""
        loop_sandbox = self._get_loop_sandbox()
        async with loop_sandbox.lock:
            sandbox, loop_sandbox.sandbox = loop_sandbox.sandbox, None
            if sandbox is not None:
                await sandbox.close()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Close the sandbox when the server shuts down."""
        try:
            yield
        finally:
            await self.close()

    def _get_loop_sandbox(self) -> _LoopSandbox:
        return self._sandboxes.setdefault(asyncio.get_running_loop(), _LoopSandbox())

    def _build(self, folder: Path, task: HarborTask) -> str:
        """Build an image, unless one with the same content exists, and return its name."""
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
