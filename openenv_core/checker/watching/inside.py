"""Run in a container by `containers`, as `python3 -c`: what its server holds, as JSON on standard output.

Arguments: `look`, or `collect` and the file in which processes note that they have thrown their garbage away.
Standard library alone. The processes are those that the container's command started; what was brought in from
outside, as this one and the health check were, is not the server's.
"""

import json
import os
import signal
import sys
import time

WAIT_TIMEOUT_S = 5.0


def main(what: str, notes: str = "") -> None:
    """Have the server's processes throw their garbage away, or look at what they hold."""
    pids = server_pids()
    if what == "collect":
        collect(pids, notes)
        return
    held = {"memory": 0, "threads": 0, "files": 0, "processes": 0}
    for pid in pids:
        try:
            status = status_of(pid)
            memory, threads = int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, KeyError):  # it has ended, or is the container's own init, which is somebody else's
            continue
        for name, value in (("memory", memory), ("threads", threads), ("files", files), ("processes", 1)):
            held[name] += value
    sys.stdout.write(json.dumps(held))


def collect(pids: list[int], notes: str) -> None:
    """Tell the processes that listen, and wait until they have."""
    with open(notes, "w", encoding="utf-8"):
        pass
    told = 0
    for pid in pids:
        try:
            if int(status_of(pid)["SigCgt"], 16) >> (signal.SIGUSR2 - 1) & 1:
                os.kill(pid, signal.SIGUSR2)
                told += 1
        except (OSError, KeyError):
            continue
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while time.monotonic() < deadline:
        with open(notes, encoding="utf-8") as file:
            if len(file.read().split()) >= told:
                break
        time.sleep(0.01)
    sys.stdout.write(json.dumps({"told": told}))


def server_pids() -> list[int]:
    """Return the processes that descend from the first one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(status_of(int(name))["PPid"])
            except (OSError, KeyError):
                continue
    found = [1]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def status_of(pid: int) -> "dict[str, str]":
    """Return what the kernel tells of a process."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}


if __name__ == "__main__":
    main(*sys.argv[1:])
