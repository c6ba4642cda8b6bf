"""What a server holds: memory, threads, files, over all of its processes."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openenv_core.checker.needs import needs
from openenv_core.checker.subject import RunningServer


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds.

    Attributes:
        memory: Bytes of memory that are its own.
        threads: Threads.
        files: Open files and sockets.
        processes: Processes; each has threads and files too.
    """

    memory: int
    threads: int
    files: int
    processes: int

    @property
    def things(self) -> tuple[int, int, int]:
        """All but the memory, which never rests."""
        return self.threads, self.files, self.processes


def held(server: RunningServer) -> Held:
    """Look at what a server holds just now."""
    try:
        import psutil
    except ImportError as error:
        raise needs("psutil", error) from error
    memory = threads = files = processes = 0
    for pid in server.pids():
        with suppress(psutil.Error):
            process: Any = psutil.Process(pid)
            memory += process.memory_info().rss
            threads += process.num_threads()
            files += process.num_fds()
            processes += 1
    return Held(memory, threads, files, processes)
