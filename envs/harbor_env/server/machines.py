"""What commands of a task run in: a process sandbox, or a container. The policy has one, and the verifier another."""

import asyncio
import io
import posixpath
import tarfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from openenv_core.errors import EngineRefusedError, OpenEnvError
from openenv_core.images.engine import BuildRequest, build_image
from openenv_core.providers.docker.container import Container, start_container
from openenv_core.providers.docker.engine import DockerEngine
from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.sandbox import (
    Execution,
    FileRefusedError,
    Isolation,
    Limits,
    Sandbox,
    SandboxConfig,
    SandboxSession,
)

from ..models import Status
from ..tasks import WORKDIR, EnvironmentTable, HarborTask, InvalidTaskError, digest

OUTPUT_BYTES: Final = 64 << 10
"""What is kept of a command's output."""

OUTPUT_HARD_BYTES: Final = 8 << 20
"""What a command may write before it is ended."""

ARCHIVE_BYTES: Final = 64 << 20
"""What a working folder may hold: what an engine's answer is read up to."""

FILE_BYTES: Final = 4 << 20

MEMORY_MB: Final = 2048
PROCESSES: Final = 512
"""What a machine gets where its task does not say, and the most processes of any."""

CALL_TIMEOUT_S: Final = 60.0
"""For what this module itself does in a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command, or a file, has come to; see `HarborObservation`."""

    status: Status = "ok"
    output: str = ""
    cut: bool = False
    exit_code: int | None = None
    reason: str | None = None


class TooLargeError(Exception):
    """A folder holds more than may be taken out of a machine."""


class Machine(Protocol):
    """One place to run commands in. Where the infrastructure fails, its methods raise `OpenEnvError` or OSError.

    Attributes:
        workdir: Where commands run.
    """

    workdir: str

    async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        """Run a command in a shell. After a time-out, or too much output, nothing runs any more."""

    async def read(self, path: str) -> CommandResult:
        """Read a file of text."""

    async def write(self, path: str, data: bytes) -> CommandResult:
        """Write a file, and the folders above it."""

    async def end(self) -> None:
        """End all that runs, for good: files can be packed, and no command be run."""

    async def pack(self, path: str) -> bytes | None:
        """Return a file or folder as a tar archive; None where there is none. Call `end` first.

        Raises:
            TooLargeError: It is.
        """

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        """Put a file or folder, as it was packed, in the place of a path, or add it to what is there."""

    async def close(self) -> None:
        """Let go of it. Idempotent."""


_INSIDE: Final = """
import os, shutil, signal, subprocess, sys, tarfile

for _name in ("app", "tests", "solution", "logs/agent", "logs/artifacts", "logs/verifier"):
    os.makedirs(_name, exist_ok=True)

def run(command, folder, variables):
    process = subprocess.Popen(["/bin/bash", "-c", command], cwd=folder, env=variables, stdin=subprocess.DEVNULL)
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
    with tarfile.open(".tmp/packed", "w", dereference=False) as archive:
        archive.add(path, arcname=os.path.basename(path))
    return True

def unpack(path, replace):
    if replace:
        shutil.rmtree(path, ignore_errors=True)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with tarfile.open(".tmp/unpacked") as archive:
        archive.extractall(os.path.dirname(path) or ".", filter="data")
    os.remove(".tmp/unpacked")
    os.makedirs("app", exist_ok=True)

def variables():
    path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
    return {**os.environ, "PATH": path, "HOME": "/tmp", "TMPDIR": "/tmp"}
"""
"""What a session's interpreter, which runs nothing else, is told first."""

_PLACES: Final = {"app": "app", "tests": "tests", "solution": "solution", "logs": "logs", "tmp": ".tmp"}
"""Where what lies below the root is in the workspace."""


def sandbox_config() -> SandboxConfig:
    """Return how sandboxes for tasks are made: with the folders that tasks name by absolute paths."""
    links = tuple(name for name in _PLACES if name != "tmp")
    return SandboxConfig(minimum=Isolation.NAMESPACES, links=links)


class SandboxMachine:
    """A session of the process sandbox.

    Args:
        session: It has nothing in it yet.
        variables: Of the task.
    """

    workdir = WORKDIR

    def __init__(self, session: SandboxSession, variables: Mapping[str, str]) -> None:
        self._session = session
        self._variables = dict(variables)

    @classmethod
    async def open(
        cls, sandbox: Sandbox, table: EnvironmentTable, variables: Mapping[str, str]
    ) -> "SandboxMachine":
        """Open one, with the working folder empty."""
        disk_bytes = (table.storage_mb or 256) << 20
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
            _require(await session.execute(_INSIDE, timeout_s=CALL_TIMEOUT_S))
            given = await session.call("variables", timeout_s=CALL_TIMEOUT_S)
            _require(given.execution)
        except BaseException:
            await session.close()
            raise
        return cls(session, {**given.value, **variables})

    async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        """Run a command; see `Machine`."""
        arguments = (command, self.workdir, {**self._variables, **variables})
        done = await self._session.call("run", arguments, timeout_s=timeout_s)
        seen = done.execution
        if seen.status == "sandbox_error":
            raise OpenEnvError(seen.reason or "the sandbox failed")
        output = seen.stdout + seen.stderr
        cut = seen.cut.stdout or seen.cut.stderr
        if seen.state_lost:
            reason = f"the command ended what it ran in: {seen.reason or seen.status}"
            return CommandResult(status="killed", output=output, cut=cut, reason=reason)
        if seen.status in ("timeout", "output_limit"):
            status: Status = "timeout" if seen.status == "timeout" else "output_limit"
            await self._session.execute("")  # takes what was written on the way to the end
            return CommandResult(status=status, output=output, cut=cut, reason=seen.reason)
        if not isinstance(done.value, int):
            trace = "".join(seen.error.traceback[-1:]) if seen.error is not None else str(seen.reason)
            return CommandResult(
                status="killed", output=output, cut=cut, reason=f"it did not begin: {trace}"[:500]
            )
        code = done.value if done.value >= 0 else 128 - done.value
        return CommandResult(output=output, cut=cut, exit_code=code)

    async def read(self, path: str) -> CommandResult:
        """Read a file of text; see `Machine`."""
        try:
            data = await self._session.get_file(self._inside(path))
        except FileRefusedError as error:
            return CommandResult(status="refused", reason=str(error))
        return text_result(data)

    async def write(self, path: str, data: bytes) -> CommandResult:
        """Write a file; see `Machine`."""
        try:
            await self._session.put_file(self._inside(path), data)
        except FileRefusedError as error:
            return CommandResult(status="refused", reason=str(error))
        return CommandResult()

    async def end(self) -> None:
        """End all that runs; see `Machine`."""
        _require((await self._session.call("end", timeout_s=CALL_TIMEOUT_S)).execution)

    async def pack(self, path: str) -> bytes | None:
        """Return a file or folder; see `Machine`."""
        try:
            inside = self._inside(path)
        except FileRefusedError:
            return None  # there is no such place
        done = await self._session.call("pack", [inside], timeout_s=CALL_TIMEOUT_S)
        if done.execution.status == "sandbox_error":
            _require(done.execution)
        if done.execution.status == "ok" and not done.value:
            return None
        try:
            data = await self._session.get_file(".tmp/packed") if done.execution.status == "ok" else b""
        except FileRefusedError as error:
            raise TooLargeError(str(error)) from None
        if not data or len(data) > ARCHIVE_BYTES:
            raise TooLargeError(f"{path} could not be packed, or has more than {ARCHIVE_BYTES >> 20} MiB")
        return data

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        """Put a file or folder in its place; see `Machine`."""
        try:
            inside = self._inside(path)
        except FileRefusedError:
            return  # it was not there to be packed
        await self._session.put_file(".tmp/unpacked", archive)
        _require((await self._session.call("unpack", [inside, replace], timeout_s=CALL_TIMEOUT_S)).execution)

    async def close(self) -> None:
        """End the session; see `Machine`."""
        await self._session.close()

    def _inside(self, path: str) -> str:
        first, _, rest = posixpath.normpath(posixpath.join(self.workdir, path)).strip("/").partition("/")
        if first not in _PLACES:
            raise FileRefusedError(path, f"expected a path below {', '.join(f'/{name}' for name in _PLACES)}")
        return posixpath.join(_PLACES[first], rest) if rest else _PLACES[first]


def _require(execution: Execution) -> None:
    if execution.status != "ok":
        why = execution.reason or (
            execution.error.evalue if execution.error is not None else execution.status
        )
        raise OpenEnvError(f"the sandbox failed: {why}")


class ContainerMachine:
    """A container without a server. All its calls block, and are made in threads.

    Args:
        container: It runs.
        engine: Where.
        workdir: Where commands run.
        user: Whose they are; "" leaves it to the image.
        shell: Their shell.
    """

    def __init__(
        self, container: Container, engine: DockerEngine, workdir: str, user: str, shell: str
    ) -> None:
        self.workdir = workdir
        self._container, self._engine = container, engine
        self._user, self._shell = user, shell

    @classmethod
    def start(
        cls,
        image: str,
        table: EnvironmentTable,
        network: str,
        user: str | int | None,
        variables: Mapping[str, str],
    ) -> "ContainerMachine":
        """Start one of an image. Blocks."""
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
            folder = table.workdir or (engine.find_image(image) or {})["Config"].get("WorkingDir") or "/"
            self = cls(container, engine, folder, "" if user is None else str(user), "sh")
            self._root(
                'mkdir -p "$0" /logs/agent /logs/artifacts /logs/verifier /tests; chmod -R 777 /logs', folder
            )
            if self._root("command -v bash").exit_code == 0:
                self._shell = "bash"
        except BaseException:
            with suppress(OpenEnvError):
                container.remove()
            raise
        return self

    async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        """Run a command; see `Machine`."""
        return await asyncio.to_thread(self._run, command, timeout_s, variables)

    def _run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        try:
            done = self._engine.execute(
                self._container.id,
                (self._shell, "-c", command),
                timeout_s=timeout_s,
                most=OUTPUT_HARD_BYTES,
                User=self._user,
                WorkingDir=self.workdir,
                Env=[f"{name}={value}" for name, value in variables.items()],
            )
            if done.exit_code is None:
                self._root("kill -9 -1")
        except EngineRefusedError:
            state = self._container.end_state()
            if state.out_of_memory:
                return CommandResult(status="killed", reason=f"the container {state}")
            raise
        output, cut = done.output[:OUTPUT_BYTES].decode(errors="replace"), len(done.output) > OUTPUT_BYTES
        if done.full:
            reason = f"it wrote more than {OUTPUT_HARD_BYTES >> 20} MiB"
            return CommandResult(status="output_limit", output=output, cut=cut, reason=reason)
        if done.exit_code is None:
            reason = f"it ran longer than {timeout_s:g} s"
            return CommandResult(status="timeout", output=output, cut=cut, reason=reason)
        return CommandResult(output=output, cut=cut, exit_code=done.exit_code)

    async def read(self, path: str) -> CommandResult:
        """Read a file of text; see `Machine`."""
        done = await self._as_user('head -c "$1" -- "$0"', self._path(path), str(FILE_BYTES + 1))
        if done.exit_code != 0:
            return CommandResult(status="refused", reason=done.output.decode(errors="replace").strip()[:500])
        return text_result(done.output)

    async def write(self, path: str, data: bytes) -> CommandResult:
        """Write a file; see `Machine`."""
        place = self._path(path)
        made = await self._as_user('mkdir -p -- "$(dirname -- "$0")" && { : >> "$0"; }', place)
        if made.exit_code != 0:
            return CommandResult(status="refused", reason=made.output.decode(errors="replace").strip()[:500])
        # By way of a folder that nothing else is in, so that the user's own shell decides where a link leads.
        await asyncio.to_thread(
            self._engine.put_archive, self._container.id, "/", _one_file("tmp/.given", data)
        )
        done = await self._as_user('cat /tmp/.given > "$0"', place)
        await asyncio.to_thread(self._root, "rm -f /tmp/.given")
        if done.exit_code != 0:
            return CommandResult(status="refused", reason=done.output.decode(errors="replace").strip()[:500])
        return CommandResult()

    async def end(self) -> None:
        """End all that runs; see `Machine`."""
        try:
            await asyncio.to_thread(self._engine.call, "POST", f"/containers/{self._container.id}/kill")
        except EngineRefusedError as error:
            if error.status != 409:  # it does not run any more
                raise

    async def pack(self, path: str) -> bytes | None:
        """Return a file or folder; see `Machine`."""
        try:
            data = await asyncio.to_thread(self._engine.archive, self._container.id, path)
        except EngineRefusedError as error:
            if error.status == 404:
                return None
            raise
        if len(data) >= ARCHIVE_BYTES:
            raise TooLargeError(f"{path} has more than {ARCHIVE_BYTES >> 20} MiB")
        return data

    async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
        """Put a file or folder in its place; see `Machine`."""

        def put() -> None:
            folder = posixpath.dirname(path)
            if replace:
                self._root('rm -rf -- "$0"', path)
            self._root('mkdir -p -- "$0"', folder)
            self._engine.put_archive(self._container.id, folder, archive)
            # The folder itself may be where commands run.
            self._root('mkdir -p -- "$0"', self.workdir)

        await asyncio.to_thread(put)

    async def close(self) -> None:
        """Remove the container; see `Machine`."""
        await asyncio.to_thread(self._container.remove)

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir, path))

    async def _as_user(self, command: str, *arguments: str) -> Any:
        return await asyncio.to_thread(self._shell_run, self._user, command, *arguments)

    def _root(self, command: str, *arguments: str) -> Any:
        return self._shell_run("0", command, *arguments)

    def _shell_run(self, user: str, command: str, *arguments: str) -> Any:
        words = ("sh", "-c", command, *arguments)
        most = FILE_BYTES + (64 << 10)
        return self._engine.execute(
            self._container.id, words, timeout_s=CALL_TIMEOUT_S, most=most, User=user, WorkingDir="/"
        )


def text_result(data: bytes) -> CommandResult:
    """Return what is told of a file's content."""
    try:
        text = data[:FILE_BYTES].decode()
    except UnicodeDecodeError:
        return CommandResult(status="refused", reason="expected a file of text in UTF-8, got another")
    return CommandResult(output=text, cut=len(data) > FILE_BYTES)


def _one_file(name: str, data: bytes) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o644
        archive.addfile(member, io.BytesIO(data))
    return held.getvalue()


def pack_folder(folder: str, name: str) -> bytes:
    """Return a folder of this machine as an archive that holds it under another name, as root's."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if "__pycache__" in member.name.split("/"):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        archive.add(folder, arcname=name, filter=owned)
    return held.getvalue()


@dataclass(slots=True)
class _Held:
    """The sandbox of one event loop."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sandbox: Sandbox | None = None


class Machines:
    """Opens machines. One object may be shared by all sessions of a server."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Held] = weakref.WeakKeyDictionary()
        self._building = threading.Lock()

    async def open(self, task: HarborTask, *, verifier: bool) -> Machine:
        """Open a machine for a phase of a task.

        Raises:
            OpenEnvError: It cannot be had: there is no engine, no such image, no sandbox of the level `namespaces`.
        """
        config = task.config
        phase = config.verifier if verifier else config.agent
        table, image = config.environment, task.image
        if verifier and config.verifier.environment is not None:
            table = config.verifier.environment
        if verifier and task.verifier_image is not None:
            image = task.verifier_image
        variables = task.variables(table.env)
        if task.kind == "process":
            return await SandboxMachine.open(await self._sandbox(), table, variables)
        network = phase.network_mode or table.network_mode
        name = image if isinstance(image, str) else await asyncio.to_thread(self._build, image, task)
        return await _kept(lambda: ContainerMachine.start(name, table, network, phase.user, variables))

    async def close(self) -> None:
        """End the sandbox of this event loop. Idempotent."""
        held = self._here()
        async with held.lock:
            sandbox, held.sandbox = held.sandbox, None
            if sandbox is not None:
                await sandbox.close()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Close the sandbox when the server ends."""
        try:
            yield
        finally:
            await self.close()

    async def _sandbox(self) -> Sandbox:
        held = self._here()
        async with held.lock:
            if held.sandbox is None:
                sandbox = Sandbox(sandbox_config())
                await sandbox.start()
                held.sandbox = sandbox
            return held.sandbox

    def _here(self) -> _Held:
        return self._held.setdefault(asyncio.get_running_loop(), _Held())

    def _build(self, folder: Path, task: HarborTask) -> str:
        """Build an image, unless there is one of that content, and return its name."""
        tag = f"ropewalk-harbor:{digest(folder)}"
        with self._building:
            if not DockerEngine.find().has_image(tag):
                if not (folder / "Dockerfile").is_file():
                    raise InvalidTaskError(f"{task.folder}: expected {folder.name}/Dockerfile, got none")
                limit_s = task.config.environment.build_timeout_sec
                request = BuildRequest(
                    context=folder, dockerfile="Dockerfile", tags=(tag,), timeout_s=limit_s
                )
                build_image(request)
        return tag


async def _kept(start: Callable[[], ContainerMachine]) -> ContainerMachine:
    """Start a container; one whose caller has gone away meanwhile is removed."""
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_let_go)
        raise


def _let_go(starting: "asyncio.Future[ContainerMachine]") -> None:
    # The container ends with the object that holds it.
    if not starting.cancelled():
        starting.exception()
