"""Landlock: what a rule allows, and that nothing else is allowed."""

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from interpreters import in_process, outcome

from openenv_core.sandbox.kernel import landlock

ABI = landlock.abi()
pytestmark = pytest.mark.skipif(ABI < 1, reason="this kernel has no Landlock")


def try_open(path: Path, flags: int) -> str:
    return outcome(lambda: os.close(os.open(path, flags, 0o600)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("open", "work", "shut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("text")
    return tmp_path


ACTIONS: dict[str, Callable[[Path], str]] = {
    "read": lambda place: try_open(place / "file", os.O_RDONLY),
    "write": lambda place: try_open(place / "file", os.O_WRONLY),
    "truncate": lambda place: outcome(lambda: os.truncate(place / "file", 0)),
    "make": lambda place: try_open(place / "new", os.O_WRONLY | os.O_CREAT),
    "list": lambda place: outcome(lambda: os.listdir(place)),
    "remove": lambda place: outcome(lambda: os.unlink(place / "file")),
    "pipe": lambda place: outcome(lambda: os.mkfifo(place / "pipe")),
}
REFUSED = dict.fromkeys(ACTIONS, "PermissionError")
EXPECTED = {
    "shut": REFUSED,
    "open": REFUSED | {"read": "done", "list": "done"},
    "work": dict.fromkeys(ACTIONS, "done") | {"pipe": "PermissionError"},
}


def restrict(readable: list[str], writable: list[str], *, execute: bool = False) -> int:
    rules = landlock.prepare_rules(map(landlock.open_path, readable), execute=execute)
    return landlock.restrict(rules, writable, execute=execute)


@pytest.mark.skipif(ABI < landlock.TRUNCATION_SINCE, reason="truncation is not covered")
def test_only_paths_of_the_rules_are_accessible(tree: Path) -> None:
    def inside() -> dict[str, dict[str, str]]:
        assert restrict([str(tree / "open")], [str(tree / "work")]) == ABI
        return {name: {action: ACTIONS[action](tree / name) for action in ACTIONS} for name in EXPECTED}

    assert in_process(inside) == EXPECTED
    assert (tree / "shut" / "file").read_text() == (tree / "open" / "file").read_text() == "text"


def test_rule_for_a_file_opens_that_file(tree: Path) -> None:
    def inside() -> list[str]:
        restrict([str(tree / "open" / "file")], [str(tree / "work" / "file")])
        names = ("open/file", "work/file")
        return [try_open(tree / name, flags) for name in names for flags in (os.O_RDONLY, os.O_RDWR)]

    assert in_process(inside) == ["done", "PermissionError", "done", "done"]


def test_programs_run_only_where_allowed() -> None:
    program = "/bin/true"

    def inside(execute: bool) -> int:
        system = ("/usr", "/lib", "/lib64", "/bin", "/etc")
        restrict([path for path in system if os.path.exists(path)], [], execute=execute)
        pid = os.fork()
        if pid == 0:
            try:
                os.execv(program, [program])
            finally:
                os._exit(99)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert in_process(lambda: inside(True)) == 0
    assert in_process(lambda: inside(False)) == 99


@pytest.mark.skipif(ABI < landlock.SIGNALS_SINCE, reason="signals are not covered")
def test_signals_and_abstract_sockets_stay_inside() -> None:
    parent = os.getpid()
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as abstract:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        abstract.bind(b"\0ropewalk-test-%d" % parent)
        abstract.listen()
        addresses = listening.getsockname(), abstract.getsockname()

        def inside() -> list[str]:
            landlock.restrict((), ())
            outside = socket.socket()
            return [
                outcome(lambda: os.kill(parent, 0)),
                outcome(lambda: os.kill(os.getpid(), signal.SIGCONT)),
                outcome(lambda: outside.connect(addresses[0])),
                outcome(lambda: socket.socket().bind(("127.0.0.1", 0))),
                outcome(lambda: socket.socket(socket.AF_UNIX).connect(addresses[1])),
            ]

        refused = "PermissionError"
        assert in_process(inside) == [refused, "done", refused, refused, refused]


def test_missing_path_is_named() -> None:
    assert "/not/there" in in_process(lambda: landlock.restrict((), ["/not/there"]))


def test_rights_grow_with_the_version() -> None:
    rights = [landlock.handled_rights(version) for version in range(1, 8)]
    assert rights == [0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF, 0xFFFF, 0xFFFF]


def test_every_abi_version_of_this_kernel_works(tree: Path) -> None:
    def inside(version: int) -> list[str]:
        landlock.abi = lambda: version
        restrict([str(tree / "open")], [str(tree / "work")])
        return [try_open(tree / name / "file", os.O_WRONLY) for name in ("shut", "open", "work")]

    for version in range(1, ABI + 1):
        assert in_process(partial(inside, version)) == ["PermissionError", "PermissionError", "done"], version
