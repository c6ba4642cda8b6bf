"""Changing the user, dropping capabilities, and other calls about the own process."""

import fcntl
import os
import resource
import signal
from pathlib import Path

import pytest
from interpreters import in_process, outcome

from openenv_core.sandbox.kernel import identity, libc

NEEDS_ROOT = pytest.mark.skipif(identity.session_uid(0) is None, reason="needs the right to change uids")


@NEEDS_ROOT
def test_dropped_identity_cannot_be_regained() -> None:
    uid = identity.session_uid(41)
    assert uid is not None

    def inside() -> list[object]:
        identity.drop_to(uid, uid)
        identity.drop_capabilities()
        status = Path("/proc/thread-self/status").read_text()
        held = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Cap")}
        return [
            os.getresuid(),
            os.getresgid(),
            os.getgroups(),
            held,
            outcome(lambda: os.setuid(0)),
            outcome(lambda: os.setgroups([0])),
            outcome(lambda: Path("/etc/shadow").read_text()),
            identity.session_uid(42),
        ]

    nothing = "0" * 16
    assert in_process(inside) == [
        [uid] * 3,
        [uid] * 3,
        [],
        dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), nothing),
        "PermissionError",
        "PermissionError",
        "PermissionError",
        None,
    ]


@NEEDS_ROOT
def test_root_without_capabilities_has_no_power() -> None:
    def inside() -> list[object]:
        identity.drop_capabilities()
        return [identity.effective_capabilities(), os.getuid(), outcome(lambda: os.setuid(5))]

    assert in_process(inside) == [0, 0, "PermissionError"]


def test_failed_step_is_named_without_privileges() -> None:
    def inside() -> str:
        identity.drop_capabilities()
        identity.drop_to(12345, 12345)
        return "dropped"

    assert "setgroups" in in_process(inside)


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        (((0, 4294967295),), [0x70000000, 0x70000001]),
        (((0, 65536),), [65471, 65470]),  # a container with 16-bit ids
        (((0, 1), (1, 65536)), [65472, 65471]),  # a rootless container
        (((1000, 1),), [None, None]),  # a user namespace of one user
        (((0, 1000),), [None, None]),
        ((), [None, None]),
    ],
)
def test_session_uids_are_mapped(
    monkeypatch: pytest.MonkeyPatch, ranges: tuple[tuple[int, int], ...], expected: list[int | None]
) -> None:
    monkeypatch.setattr(identity, "mapped_ranges", lambda path: ranges)
    monkeypatch.setattr(identity, "_has_capability", lambda number: True)
    assert [identity.session_uid(0), identity.session_uid(1)] == expected
    assert len({identity.session_uid(slot) for slot in range(1000)}) == (1000 if expected[0] else 1)


def test_errors_name_the_failed_step() -> None:
    with pytest.raises(OSError, match=r"the step: Bad file descriptor") as caught:
        libc.call("close", 999_999, step="the step")
    assert caught.value.errno == 9
    with pytest.raises(OSError, match="fchdir: "):
        libc.call("fchdir", -1)


def test_descriptors_beyond_the_limit_are_closed_too() -> None:
    def inside() -> list[str]:
        high = fcntl.fcntl(0, fcntl.F_DUPFD, 200)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        before = outcome(lambda: os.fstat(high))
        kept = os.dup(0)
        libc.close_from(max(kept + 1, 150))
        return [before, outcome(lambda: os.fstat(high)), outcome(lambda: os.fstat(kept))]

    assert in_process(inside) == ["done", "OSError", "done"]


def test_sigchld_arrives_for_exits_not_for_stops() -> None:
    def signals_of_a_child(deaths_alone: bool) -> int:
        signals: list[object] = []
        signal.signal(signal.SIGCHLD, lambda *_: signals.append(1))
        if deaths_alone:
            libc.receive_only_sigchld()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)
        return len(signals)

    assert in_process(lambda: signals_of_a_child(True)) == 1
    assert in_process(lambda: signals_of_a_child(False)) > 1
