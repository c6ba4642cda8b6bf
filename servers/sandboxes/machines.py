"""The backends of sandboxes: isolated processes, or containers of the local engine, each with an agent inside."""

import asyncio
import contextlib
import inspect
import logging
import socket
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from openenv_core.errors import EngineRefusedError, OpenEnvError
from openenv_core.providers.docker import Container, ContainerOptions, DockerEngine, start_container
from openenv_core.providers.docker.attach import attach
from openenv_core.sandbox import FileRefusedError, Limits, Sandbox, SandboxSession
from openenv_core.sandbox.inside import agent, cells, interpreter
from servers.sandboxes.guest import Guest, GuestError

logger = logging.getLogger("servers")

BOOT_TIMEOUT_S: Final = 60.0
GREETING_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 2.0
FOREVER_S: Final = 10.0 * 365 * 86_400


class ProcessMachine:
    """A sandbox session, with the isolation of an interpreter but subprocesses allowed.

    Attributes:
        guest: The client of its agent.
        isolation: The isolation level of its code.
        cpus: CPUs that it may use.
        memory_bytes: Memory that it may use.
    """

    def __init__(self, guest: Guest, session: SandboxSession, channel: socket.socket | None) -> None:
        self.guest = guest
        self.isolation = str(session.isolation)
        self.cpus = 1.0
        self.memory_bytes = session.limits.memory_bytes
        self._session = session
        self._serving = asyncio.create_task(self._serve(channel), name="sandbox")
        self._forking = asyncio.Lock()
        self._frozen = False

    @classmethod
    async def start(cls, sandbox: Sandbox, limits: Limits) -> "ProcessMachine":
        """Fork one from the zygote; SandboxUnavailableError if this machine cannot."""
        limits = replace(limits, timeout_s=FOREVER_S, allow_subprocess=True)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(theirs.close)
            undo.callback(ours.close)
            guest = await _connect(await sandbox.open(limits, snapshot=True), ours)
            undo.pop_all()
        return cls(*guest, theirs)

    async def _serve(self, channel: socket.socket | None) -> None:
        with channel or contextlib.nullcontext():
            await self._session.serve(channel)

    async def begin(self, envs: dict[str, str]) -> None:
        """Wait for its agent and set the environment variables."""
        await self.guest.wait_ready(envs, GREETING_TIMEOUT_S)

    async def freeze(self, *, frozen: bool) -> None:
        """Pause or resume all its processes; GuestError if it has forks: their processes cannot be told apart."""
        async with self._forking:  # a fork of a paused sandbox would wait for it in vain
            if self._session.has_relatives:
                raise GuestError("failed_precondition", "the sandbox has forks or snapshots; end them first")
            self._session.freeze(frozen=frozen)
            self._frozen = frozen

    async def fork(self, contexts: list[str]) -> "Machine":
        """Fork its agent and interpreters. Running commands stay with the original."""
        ours, theirs = socket.socketpair()

        async def ask(folder: str) -> None:
            await self.guest.ask("fork", folder=folder, contexts=contexts)

        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            async with self._forking:
                if self._frozen:
                    raise GuestError("aborted", "the sandbox is paused")
                try:
                    session = await self._session.fork_agent(theirs, len(contexts), ask)
                except FileRefusedError as error:
                    text = f"the files were not copied: {error.reason}"
                    raise GuestError("resource_exhausted", text) from None
            guest = await _connect(session, ours)
            undo.pop_all()
        return ProcessMachine(*guest, None)

    async def close(self) -> None:
        """End its processes and remove its files. Idempotent; called again after a failure."""
        await self.guest.close()
        if self._session.has_relatives:  # its agent ends what it has started once the channel is closed
            await asyncio.wait([self._serving], timeout=END_TIMEOUT_S)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._session.close()


async def _connect(session: SandboxSession, channel: socket.socket) -> tuple[Guest, SandboxSession]:
    """Return the client of a session's agent, and the session, which is closed if there can be no client."""
    try:
        return Guest(*await asyncio.open_unix_connection(sock=channel)), session
    except BaseException:
        await session.close()
        raise


_SLEEP_PROGRAM: Final = "import signal; signal.pause()"
_BOOT: Final = (
    "import os, sys\nsize, text = int(sys.argv[1]), b''\n"
    "while len(text) < size: text += os.read(0, size - len(text))\nexec(text)"
)
_MAIN: Final = """
import os, sys, types
for name, source in sources.items():
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = f"/ropewalk/{name}.py"
    exec(compile(source, module.__file__, "exec"), module.__dict__)
home = os.path.expanduser("~")
if not os.access(home, os.W_OK):
    home = "/tmp"
os.environ["HOME"] = home
sys.modules["openenv_core.sandbox.inside.agent"].Agent(0, 1, home, sessions=True).serve()
"""


def _program() -> bytes:
    """Return the agent's source as one program for a container's own Python."""
    packages = ("openenv_core", "openenv_core.sandbox", "openenv_core.sandbox.inside")
    modules = {each.__name__: inspect.getsource(each) for each in (cells, interpreter, agent)}
    return f"sources = {dict.fromkeys(packages, '') | modules!r}{_MAIN}".encode()


class ContainerMachine:
    """A container of the local engine; the agent in it is run by the image's own Python.

    Its attributes and methods are those of `ProcessMachine`.
    """

    def __init__(self, guest: Guest, engine: DockerEngine, container: Container, config: Any) -> None:
        self.guest = guest
        self.isolation = "container"
        self.cpus = container.options.cpus or 1.0
        self.memory_bytes = container.options.memory_bytes or 0
        self._engine, self._container, self._config = engine, container, config

    @classmethod
    async def start(
        cls, image: str, options: ContainerOptions, image_id: str | None = None
    ) -> "ContainerMachine":
        """Start a container and its agent; the image is the one of that id, or else the one with that name now.

        Raises:
            ProviderError: The engine cannot start a container of the image.
            GuestError: The image has no Python 3.10 or later.
        """
        engine = DockerEngine.find()
        image_details = await asyncio.to_thread(engine.find_image, image_id or image) or {}
        config, image_id = image_details.get("Config") or {}, image_details.get("Id", image_id)
        options = options.model_copy(update={"entrypoint": ("python3", "-c", _SLEEP_PROGRAM), "command": ()})
        start = partial(start_container, engine=engine, image_id=image_id, serves=False)
        starting = asyncio.create_task(asyncio.to_thread(start, image, options), name=f"start of {image}")
        guest: Guest | None = None
        try:
            container = await asyncio.shield(starting)
            guest = await _attach_agent(engine, container.id)
            await guest.wait_ready({}, options.start_timeout_s)
        except BaseException:
            if guest is not None:
                await guest.close()
            container = await asyncio.shield(starting)  # a thread cannot be cancelled
            await asyncio.to_thread(container.remove)
            raise
        return cls(guest, engine, container, config)

    async def begin(self, envs: dict[str, str]) -> None:
        """Set the environment variables, then start the image's own command."""
        await self.guest.wait_ready(envs, GREETING_TIMEOUT_S)
        argv = [*(self._config.get("Entrypoint") or ()), *(self._config.get("Cmd") or ())]
        if argv:
            cwd = self._config.get("WorkingDir") or "/"
            command = {"cmd": argv[0], "args": argv[1:], "envs": {}, "cwd": cwd, "stdin": False}
            with contextlib.suppress(GuestError):
                await self.guest.ask("start", stream="image", **command)

    async def freeze(self, *, frozen: bool) -> None:
        """Have the engine pause or resume the container."""
        verb = "pause" if frozen else "unpause"
        await asyncio.to_thread(self._engine.call, "POST", f"/containers/{self._container.id}/{verb}")

    async def fork(self, contexts: list[str]) -> "Machine":
        """Raise a GuestError: containers cannot be forked."""
        raise GuestError(
            "unimplemented",
            "a container cannot be forked: an engine copies files, but no memory; use a process sandbox",
        )

    async def close(self) -> None:
        """Remove the container. Idempotent; called again after a failure."""
        await self.guest.close()
        await asyncio.to_thread(self._container.remove)


Machine: TypeAlias = ProcessMachine | ContainerMachine
"""The backend of one sandbox."""

_Kind: TypeAlias = tuple[str, ContainerOptions, str | None]
"""An image's name, the options of its container, and the image's id, which changes when it is rebuilt; None: there is
no such image."""


class WarmContainers:
    """Containers started in advance, each handed out once.

    A request for an image starts further containers of it, as long as there is room. If there is none, and no ready
    container is of the image, the oldest is removed.

    Args:
        size: Maximum number of containers; 0: every container is started on request.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ready: list[tuple[_Kind, ContainerMachine]] = []
        self._filling: asyncio.Task[None] | None = None

    async def take(self, image: str, options: ContainerOptions) -> ContainerMachine:
        """Return an unused container; raises what `ContainerMachine.start` raises."""
        if not self._size:
            return await ContainerMachine.start(image, options)
        image_details = await asyncio.to_thread(DockerEngine.find().find_image, image)
        kind = image, options, (image_details or {}).get("Id")
        usable = [each for each in self._ready if each[0] == kind and not each[1].guest.gone.done()]
        if usable:
            self._ready.remove(usable[0])
        machine = usable[0][1] if usable else await ContainerMachine.start(*kind)
        if self._size and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill(kind), name="warm containers")
        return machine

    async def close(self) -> None:
        """Start no more containers and remove the unused ones."""
        self._size = 0  # the container being started now is the last
        if self._filling is not None:
            await asyncio.wait([self._filling], timeout=END_TIMEOUT_S)
            self._filling.cancel()
            await asyncio.wait([self._filling])
        while self._ready:
            await self._drop(self._ready[0])

    async def _fill(self, kind: _Kind) -> None:
        image, options, _ = kind
        try:
            for each in list(self._ready):
                was_rebuilt = each[0] != kind and each[0][:2] == (image, options)
                if each in self._ready and (was_rebuilt or each[1].guest.gone.done()):
                    await self._drop(each)
            if len(self._ready) >= self._size and all(each[0] != kind for each in self._ready):
                await self._drop(self._ready[0])
            while len(self._ready) < self._size:
                self._ready.append((kind, await ContainerMachine.start(*kind)))
        except (OpenEnvError, GuestError, TimeoutError, OSError) as error:
            logger.warning(
                "no container of %s is kept warm: %s", image, error
            )  # the next request tries again

    async def _drop(self, each: tuple[_Kind, ContainerMachine]) -> None:
        self._ready.remove(each)
        with contextlib.suppress(OpenEnvError):  # the companion removes it later
            await each[1].close()


async def _attach_agent(engine: DockerEngine, container: str) -> Guest:
    """Start the agent in a container; return its client."""
    program = _program()
    command = ["python3", "-u", "-c", _BOOT, str(len(program))]
    exec_id = await asyncio.to_thread(engine.create_exec, container, command, AttachStdin=True)
    async with asyncio.timeout(BOOT_TIMEOUT_S):
        try:
            reader, writer = await attach(engine.address, exec_id)
        except EngineRefusedError as error:
            raise GuestError("unavailable", str(error)) from error
    writer.write(program)
    return Guest(reader, writer)
