"""The sandbox of agents' programs: what each may see, and the way from its network to the gateway."""

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from openenv_core.packages import module_command
from openenv_core.sandbox.kernel import cgroups
from openenv_core.sandbox.readable import find_readable
from rl_bridge.agents.confine import Confinement

CHUNK_BYTES: Final = 1 << 16
MAX_CONNECTIONS: Final = 256
"""Connections of a program to the gateway at a time; further ones are closed."""
INITS: Final = 1
"""Processes of ours beside a program's own."""
ETC: Final = ("passwd", "group", "hosts", "nsswitch.conf", "ssl", "ca-certificates")


class AgentSandbox:
    """Confines programs: each has its own network, whose one port leads to the gateway, and an empty folder.

    Args:
        program: The command's name or path, which is readable with what it is installed with.
        readable: Further readable files and folders.
        gateway: The address of the gateway.
        memory_bytes: The memory of a program and its folder.
        processes: How many processes and threads it may have.
    """

    def __init__(
        self,
        program: str,
        readable: Sequence[str],
        gateway: tuple[str, int],
        *,
        memory_bytes: int,
        processes: int,
    ) -> None:
        etc = [Path("/etc", name) for name in ETC]
        self._shown, self._hidden = find_readable([*etc, *find_installation(program), *map(Path, readable)])
        self._gateway = gateway
        self._memory_bytes, self._processes = memory_bytes, processes
        self._cgroups = cgroups.find()

    @asynccontextmanager
    async def open(
        self, command: Sequence[str], files: Mapping[str, str]
    ) -> AsyncIterator[tuple[list[str], int]]:
        """Yield the command that runs a command confined, and the descriptor that it has to inherit.

        The command has to be started within the block, which is to end with it.

        Args:
            command: The program and its arguments.
            files: Files to write in its folder.
        """
        spec = Confinement(
            self._shown, self._hidden, dict(files), self._gateway[1], self._memory_bytes, self._processes
        ).encode()
        ours, theirs = socket.socketpair()
        with ours, theirs, self._make_group() as doors:
            socket.send_fds(ours, [spec[:1]], doors)
            relaying = asyncio.create_task(self._relay(ours, spec[1:]))
            try:
                yield (
                    [*module_command("rl_bridge.agents.confine"), str(theirs.fileno()), *command],
                    theirs.fileno(),
                )
            finally:
                relaying.cancel()
                await asyncio.gather(relaying, return_exceptions=True)

    @contextmanager
    def _make_group(self) -> Iterator[list[int]]:
        """Yield descriptors by which a process joins a control group of its own; none if no group can be made here."""
        if self._cgroups is None:
            yield []
            return
        group = self._cgroups.make("agent", self._memory_bytes, self._processes + INITS)
        try:
            doors = group.open_join_files()
            try:
                yield doors
            finally:
                for door in doors:
                    os.close(door)
        finally:
            group.kill()
            group.remove()

    async def _relay(self, link: socket.socket, spec: bytes) -> None:
        """Take the socket that listens in the program's network, and pass its connections on to the gateway."""
        loop = asyncio.get_running_loop()
        link.setblocking(False)
        await loop.sock_sendall(link, spec)
        link.shutdown(socket.SHUT_WR)
        readable = asyncio.Event()
        loop.add_reader(link, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(link)
        _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if not descriptors:
            return  # it could not be confined, as its output says
        pass_on = partial(self._pass_on, asyncio.Semaphore(MAX_CONNECTIONS))
        async with await asyncio.start_server(pass_on, sock=socket.socket(fileno=descriptors[0])) as server:
            await server.serve_forever()

    async def _pass_on(
        self, free: asyncio.Semaphore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with closing(writer):
            if not free.locked():
                async with free:
                    await self._pass_both_ways(reader, writer)

    async def _pass_both_ways(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._gateway)
        except OSError:
            return
        ways = [asyncio.ensure_future(_pump(reader, back)), asyncio.ensure_future(_pump(there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            back.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


def find_installation(program: str) -> list[Path]:
    """Return what an installed program needs: its file, the `bin`, virtual environment or `node_modules` that it is in.

    Other folders may hold anything, such as a home.
    """
    found = shutil.which(program)
    if found is None:
        return []
    path = Path(found).absolute()
    real = path.resolve()
    needed = [path, real]
    if path.parent.name == "bin":  # where `#!/usr/bin/env node` finds what it was installed with
        needed.append(path.parent)
    needed += [parent for parent in real.parents if parent.name == "node_modules"]
    if (path.parents[1] / "pyvenv.cfg").exists():
        needed += [path.parents[1], (path.parent / "python").resolve().parents[1]]
    return needed
