"""The tables of system calls against numbers known from other sources."""

import re
from pathlib import Path

import pytest

from openenv_core.sandbox.kernel.syscalls import AARCH64, ARCHITECTURES, X86_64, SyscallTable

KNOWN = {
    X86_64: "read 0 open 2 mmap 9 ioctl 16 socket 41 clone 56 fork 57 execve 59 kill 62 fcntl 72 ptrace 101 prctl 157 "
    "arch_prctl 158 mount 165 futex 202 openat 257 unshare 272 prlimit64 302 seccomp 317 memfd_create 319 bpf 321 "
    "statx 332 rseq 334 uretprobe 335",
    AARCH64: "setxattr 5 getcwd 17 fcntl 25 ioctl 29 mount 40 openat 56 read 63 newfstatat 79 exit 93 unshare 97 "
    "futex 98 ptrace 117 kill 129 prctl 167 socket 198 socketpair 199 clone 220 execve 221 mmap 222 "
    "perf_event_open 241 wait4 260 prlimit64 261 seccomp 277 memfd_create 279 bpf 280 statx 291 rseq 293 "
    "kexec_file_load 294",
}
SHARED = (
    "pidfd_send_signal 424 io_uring_setup 425 pidfd_open 434 clone3 435 close_range 436 faccessat2 439 "
    "mount_setattr 442 landlock_create_ruleset 444 landlock_restrict_self 446 futex_waitv 449 fchmodat2 452 mseal 462 "
    "file_setattr 469"
)


@pytest.mark.parametrize("architecture", [X86_64, AARCH64], ids=lambda architecture: architecture.name)
def test_known_numbers_are_right(architecture: SyscallTable) -> None:
    expected_numbers = f"{KNOWN[architecture]} {SHARED}".split()
    known = dict(zip(expected_numbers[::2], map(int, expected_numbers[1::2]), strict=True))
    assert {name: architecture.numbers.get(name) for name in known} == known
    assert len(set(architecture.numbers.values())) == len(architecture.numbers)
    assert architecture.last == 469


def test_tables_lack_legacy_calls_and_unassigned_numbers() -> None:
    older = {"open", "stat", "fork", "vfork", "pipe", "poll", "select", "dup2", "chmod", "arch_prctl"}
    assert older <= X86_64.numbers.keys()
    assert older.isdisjoint(AARCH64.numbers)
    assert not {*range(295, 424), *range(244, 260)} & set(AARCH64.numbers.values())
    assert not {*range(336, 424)} & set(X86_64.numbers.values())


HEADERS = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")]


@pytest.mark.skipif(not any(map(Path.exists, HEADERS)), reason="no kernel headers for x86-64 installed here")
def test_x86_64_matches_the_headers_of_this_machine() -> None:
    text = next(path for path in HEADERS if path.exists()).read_text()
    headers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", text)}
    assert len(headers) > 300
    # Headers older or younger than the table name fewer or more calls, and no call otherwise.
    ours = X86_64.numbers
    assert {name: number for name, number in headers.items() if ours.get(name, number) != number} == {}
    unknown = {name for name, number in headers.items() if number <= X86_64.last and name not in ours}
    assert unknown <= {"uprobe"}


def test_every_alias_is_a_table() -> None:
    assert ARCHITECTURES["amd64"] is X86_64
    assert ARCHITECTURES["arm64"] is AARCH64
    assert (X86_64.audit, AARCH64.audit) == (0xC000003E, 0xC00000B7)
