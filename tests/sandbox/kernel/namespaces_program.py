"""Run by path in a separate interpreter: enters namespaces, opens two sessions, reports what it saw.

Prints one JSON object.
"""

import errno
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

settings: dict[str, Any] = json.loads(sys.argv[1])
sys.path.insert(0, settings["sandbox"])

from kernel import identity, libc, limits, namespaces  # noqa: E402

PRIVILEGED: bool = settings["privileged"]


def outcome(function: Callable[[], object]) -> str:
    try:
        function()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    except BaseException as error:
        return repr(error)
    return "done"


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def read_device() -> None:
    descriptor = os.open("/dev/urandom", os.O_RDONLY | os.O_CLOEXEC)
    os.read(descriptor, 8)
    os.close(descriptor)


def write(path: str, content: bytes = b"x") -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def in_child(function: Callable[[], Any], fork: Callable[[], int] = os.fork) -> Any:
    read, end = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            os.write(end, json.dumps(function()).encode())
        except BaseException as error:
            os.write(end, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(end)
    output = b""
    while part := os.read(read, 65536):
        output += part
    os.close(read)
    os.waitpid(pid, 0)
    return json.loads(output or b'"nothing"')


def many_files() -> None:
    os.unlink("big")
    for number in range(1000):
        write(f"many{number}", b"")


def opened() -> list[int]:
    """Return the open descriptors, and the lowest free one, by which a listing of /dev/fd reads."""
    numbers = [number for number in range(64) if outcome(partial(os.fstat, number)) == "done"]
    return [*numbers, next(number for number in range(64) if number not in numbers)]


def inside(uid: int) -> dict[str, Any]:
    if PRIVILEGED:
        identity.drop_to(uid, uid)
    identity.drop_capabilities()
    os.chdir("/workspace")
    left_behind = sorted(os.listdir("."))
    return {
        "pid": os.getpid(),
        "uid": os.getuid(),
        "left_behind": left_behind,
        "root": sorted(os.listdir("/")),
        "dev": sorted(os.listdir("/dev")),
        "proc": sorted(os.listdir("/proc")),
        "processes": [name for name in os.listdir("/.proc") if name.isdigit()],
        "descriptors": sorted(map(int, os.listdir("/dev/fd"))),
        "opened": sorted(opened()),
        "init": outcome(lambda: os.stat("/.proc/1")),
        "write_proc": outcome(lambda: write("/proc/self/oom_score_adj", b"0")),
        "shown": outcome(lambda: read(settings["shown"])),
        "unseen": outcome(lambda: read(settings["unseen"])),
        "hidden_directory": os.listdir(settings["hidden_directory"]),
        "hidden_file": read(settings["hidden_file"]),
        "link": os.readlink(settings["link"]),
        "tmp": os.path.realpath("/tmp"),
        "through_link": outcome(lambda: read(settings["link"] + "/module.py")),
        "write": outcome(lambda: write("file")),
        "write_tmp": outcome(lambda: write("/tmp/file")),
        "write_null": outcome(lambda: write("/dev/null")),
        "read_random": outcome(read_device),
        "meminfo": read("/proc/meminfo")[:8],
        "write_shown": outcome(lambda: write(settings["shown"])),
        "chmod_shown": outcome(lambda: os.chmod(settings["shown"], 0o777)),
        "write_beside_shown": outcome(lambda: write(settings["shown"] + ".new")),
        "write_mounted": outcome(lambda: write(settings["mounted"] + "/file")),
        "write_root": outcome(lambda: write("/file")),
        "write_dev": outcome(lambda: write("/dev/file")),
        "mount": outcome(lambda: libc.call("mount", b"t", b"/workspace", b"tmpfs", 0, None)),
        "kill_others": outcome(lambda: os.kill(settings["server_pid"], 0)),
        "too_much": outcome(lambda: write("big", bytes(settings["size_bytes"] + 1))),
        "too_many": outcome(many_files),
        "capabilities": identity.effective_capabilities(),
    }


def interfaces() -> list[str]:
    import socket

    return [name for _number, name in socket.if_nameindex()]


def session(uid: int, gid: int, proc: int) -> Any:
    namespaces.settle_session(PRIVILEGED, uid, gid, settings["size_bytes"], settings["inodes"], proc=proc)
    return {"proc_closed": outcome(lambda: os.fstat(proc)), "interfaces": interfaces(), **inside(uid)}


def fork_session() -> int:
    return namespaces.fork_session(privileged=PRIVILEGED)


def zygote() -> dict[str, Any]:
    proc = namespaces.open_proc()
    own = (os.getuid(), os.getgid())
    ids = [(identity.session_uid(slot),) * 2 for slot in (7, 8)] if PRIVILEGED else [own, own]
    namespaces.build_root(
        settings["paths"], (settings["hidden_directory"], settings["hidden_file"], "/not/there")
    )
    base = limits.footprint(proc)
    sessions = [
        in_child(lambda pair=pair: in_child(lambda: session(*pair, proc)), fork_session) for pair in ids
    ]
    return {"pid": os.getpid(), "sessions": sessions, "footprint": base.address_space}


def main() -> dict[str, Any]:
    if not PRIVILEGED:
        # As in the zygote, whose memory no session of the same uid may look into.
        libc.set_dumpable(False)
    try:
        namespaces.enter_outer(privileged=PRIVILEGED)
    except OSError as error:
        return {"refused": str(error)}
    result: dict[str, Any] = in_child(zygote)
    assert isinstance(result, dict), result
    if not PRIVILEGED:
        result["still_not_dumpable"] = not libc.is_dumpable()
    return result


json.dump(main(), sys.stdout)
