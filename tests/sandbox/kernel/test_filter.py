"""Seccomp filters, run by a simulator on both architectures: every call number, and rules on arguments."""

import errno
from collections.abc import Iterator

import bpf_simulator as bpf
import pytest

from openenv_core.sandbox.kernel.seccomp import (
    ABSENT,
    ATTRIBUTES,
    PLAIN,
    UNSUPPORTED,
    SeccompPolicy,
    Verdict,
    assemble,
    decide,
    one_of,
    program,
    when,
)
from openenv_core.sandbox.kernel.syscalls import AARCH64, X86_64, SyscallTable

ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x50000 | errno.EPERM
ENOSYS = 0x50000 | errno.ENOSYS
PID = 4321

POLICIES = {
    "plain": SeccompPolicy(PID),
    "own_uid": SeccompPolicy(PID, shared_uid=False),
    "subprocess": SeccompPolicy(None, allow_subprocess=True),
    "groups": SeccompPolicy(None, allow_subprocess=True, groups=True, shared_uid=False),
    "fork": SeccompPolicy(None, allow_fork=True, shared_uid=False),
}

# Those whose verdict depends on arguments, in one policy or another.
JUDGED = """
clone fcntl futex getsockopt ioctl kill madvise prctl prlimit64 recvfrom recvmsg sched_setaffinity sendto setpriority
setsockopt socketpair tgkill tkill
"""

# Spelled out here, so that no slip in the allow-list lets one of them in.
NEVER = """
acct add_key bind bpf chroot clock_settime connect accept accept4 listen socket sendmsg sendmmsg recvmmsg capset
delete_module execveat fanotify_init fanotify_mark finit_module fsopen fsmount fsconfig fspick
get_robust_list init_module inotify_init1 inotify_add_watch io_setup io_submit io_uring_enter
io_uring_register io_uring_setup ioprio_set kcmp kexec_load keyctl landlock_create_ruleset
landlock_restrict_self lookup_dcookie mbind membarrier memfd_create memfd_secret migrate_pages mincore
mknodat mlock mlockall mount mount_setattr move_mount move_pages mq_open msgget name_to_handle_at
open_by_handle_at open_tree perf_event_open personality pidfd_getfd pidfd_open pidfd_send_signal
pivot_root process_madvise process_vm_readv process_vm_writev ptrace quotactl reboot request_key
rt_sigqueueinfo rt_tgsigqueueinfo sched_setattr sched_setparam sched_setscheduler seccomp semget
set_mempolicy setdomainname setfsuid setgid setgroups sethostname setns setpgid setregid setresgid
setresuid setreuid setsid settimeofday setuid shmat shmget signalfd4 splice swapon sync syncfs syslog tee
timer_create timerfd_create umount2 unshare userfaultfd vhangup vmsplice
"""

GROUPS = {"setpgid", "setsid"}
"""Refused unless something other than the process group reaches all processes of a session."""


@pytest.fixture(params=[X86_64, AARCH64], ids=lambda architecture: architecture.name)
def architecture(request: pytest.FixtureRequest) -> SyscallTable:
    table: SyscallTable = request.param
    return table


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> SeccompPolicy:
    return POLICIES[request.param]


class Filter:
    def __init__(self, policy: SeccompPolicy, architecture: SyscallTable) -> None:
        self.architecture = architecture
        self.code = assemble(policy, architecture)

    def __call__(self, name: str, *arguments: int) -> int:
        number = self.architecture.numbers[name]
        return bpf.run(self.code, self.architecture.audit, number, *arguments).verdict


@pytest.fixture
def run(policy: SeccompPolicy, architecture: SyscallTable) -> Filter:
    return Filter(policy, architecture)


def expected_verdicts(policy: SeccompPolicy, architecture: SyscallTable) -> Iterator[tuple[int, int]]:
    """Yield the expected verdict of every number whose verdict does not depend on arguments."""
    names = {number: name for name, number in architecture.numbers.items()}
    allowed = set(PLAIN)
    if policy.allow_subprocess:
        allowed |= {"execve"}
    if policy.allow_subprocess or policy.allow_fork:
        allowed |= {"fork", "vfork"}
    if policy.groups:
        allowed |= GROUPS
    if policy.pid is None:
        allowed |= {"tkill", "tgkill"}
        allowed |= {"kill"} if policy.groups or not policy.allow_subprocess else set()
    if not policy.shared_uid:
        allowed |= ATTRIBUTES
    for number in range(1024):
        name = names.get(number)
        if name in allowed:
            yield number, ALLOW
        elif name in JUDGED.split():
            continue
        elif name is None or name in ABSENT or number >= 449:
            yield number, ENOSYS
        elif name in UNSUPPORTED:
            yield number, 0x50000 | errno.EOPNOTSUPP
        else:
            yield number, EPERM


def test_every_number_gets_the_verdict_of_the_policy(
    policy: SeccompPolicy, architecture: SyscallTable
) -> None:
    code = assemble(policy, architecture)
    for number, expected in expected_verdicts(policy, architecture):
        # Whatever the arguments are: they must not even be looked at.
        result = bpf.run(code, architecture.audit, number, *(~0,) * 6)
        assert (number, result.verdict) == (number, expected)
        assert result.loads == {0, 4}, f"call {number} would miss the kernel's bitmap of constant verdicts"


def test_forbidden_calls_are_refused_by_every_policy(run: Filter, policy: SeccompPolicy) -> None:
    for name in set(NEVER.split()) & run.architecture.numbers.keys() - (GROUPS if policy.groups else set()):
        for arguments in ((0,) * 6, (1,) * 6, (PID,) * 6, (~0,) * 6):
            assert run(name, *arguments) in (EPERM, ENOSYS), name
    assert set(NEVER.split()) <= set(X86_64.numbers)


def test_foreign_architectures_and_numbers_are_refused(
    policy: SeccompPolicy, architecture: SyscallTable
) -> None:
    code = assemble(policy, architecture)
    for audit in {X86_64.audit, AARCH64.audit, 0x40000003, 0} - {architecture.audit}:
        assert bpf.run(code, audit, architecture.numbers["read"]).verdict == KILL
    beyond = bpf.run(code, architecture.audit, 0x40000000).verdict
    assert beyond == (KILL if architecture is X86_64 else ENOSYS)
    assert bpf.run(code, architecture.audit, 0xFFFFFFFF).verdict == beyond
    assert bpf.run(code, architecture.audit, 0x3FFFFFFF).verdict == ENOSYS


def test_code_is_valid_for_the_kernel(policy: SeccompPolicy, architecture: SyscallTable) -> None:
    code = bpf.instructions(assemble(policy, architecture))
    assert len(code) < 600  # a tree over ranges, and no chain over numbers
    for at, (op, true, false, operand) in enumerate(code):
        assert op in (0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06)
        furthest = operand if op == 0x05 else max(true, false)
        assert at + 1 + furthest < len(code) or op == 0x06
    assert code[-1][0] == 0x06


THREAD = 0x3D0F00  # what glibc passes
MUSL_THREAD = 0x7D0F00
NEW_NAMESPACES = [0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
FORK = 0x1200011
SPAWN = 0x4111  # what posix_spawn passes


def test_clone_allows_threads_only(architecture: SyscallTable) -> None:
    run = Filter(SeccompPolicy(PID), architecture)
    assert run("clone", THREAD) == run("clone", MUSL_THREAD) == ALLOW
    for flags in (FORK, SPAWN, 17, 0, THREAD & ~0x10000, THREAD & ~0x100, 0x10000):
        assert run("clone", flags) == EPERM
    for flag in [*NEW_NAMESPACES, 0x2000, 0x8000, 0x800000, 0x80000000, 0x4000, 17, 1 << 32, 1 << 63]:
        assert run("clone", THREAD | flag) == EPERM, hex(flag)


@pytest.mark.parametrize("name", ["subprocess", "fork"])
def test_clone_allows_forks_without_namespaces(architecture: SyscallTable, name: str) -> None:
    run = Filter(POLICIES[name], architecture)
    for flags in (FORK, SPAWN, 17, THREAD):
        assert run("clone", flags) == ALLOW
    # The parent hears of the end by SIGCHLD or not at all, and is the one that forked.
    for flag in [*NEW_NAMESPACES, 0x2000, 0x8000, 0x800000, 1 << 32, 1 << 63]:
        assert run("clone", FORK | flag) == EPERM, hex(flag)
    assert run("clone", 9) == EPERM
    assert run("execve") == (ALLOW if name == "subprocess" else EPERM)


def test_programs_cannot_signal_the_group_that_they_share_with_the_interpreter(
    architecture: SyscallTable,
) -> None:
    shared, own = (Filter(POLICIES[name], architecture) for name in ("subprocess", "groups"))
    assert [run("kill", 0, 15) for run in (shared, own)] == [EPERM, ALLOW]
    assert [shared("kill", pid & 0xFFFF_FFFF, 15) for pid in (PID, -1, -PID)] == [ALLOW] * 3


def test_signals_reach_only_the_own_process(architecture: SyscallTable) -> None:
    run = Filter(SeccompPolicy(PID), architecture)
    assert run("kill", PID, 9) == run("kill", 0, 9) == run("tgkill", PID, 5000, 9) == ALLOW
    assert run("tkill", PID, 9) == ALLOW
    for target in (1, PID + 1, -1, -PID, PID - (1 << 31)):
        assert run("kill", target, 9) == EPERM
        assert run("tkill", target, 9) == EPERM
        assert run("tgkill", target, PID, 9) == EPERM
    assert run("tkill", 0, 9) == run("tgkill", 0, 1, 9) == EPERM
    # The kernel takes the lower word, whatever lies above it.
    assert run("kill", (1 << 32) | 1, 9) == EPERM
    assert run("kill", (1 << 32) | PID, 9) == ALLOW


def test_settings_of_other_processes_cannot_be_changed(
    policy: SeccompPolicy, architecture: SyscallTable
) -> None:
    run = Filter(policy, architecture)
    own = [0] if policy.pid is None else [0, PID]
    for target in (0, 1, PID, PID + 1, -1):
        expected = ALLOW if target in own else EPERM
        assert run("prlimit64", target, 7, 0, 0) == expected
        assert run("sched_setaffinity", target, 8, 0) == expected
        assert run("setpriority", 0, target, 5) == expected
        assert run("setpriority", 1, target, 5) == EPERM  # a group of processes
        assert run("setpriority", 2, target, 5) == EPERM  # all of a user


# By call and the place of the argument that decides: values that are allowed, and values that are refused.
HARMLESS: dict[tuple[str, int], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("prctl", 0): (
        (15, 16, 3, 39, 0x53564D41),
        (1, 4, 8, 10, 14, 22, 24, 26, 28, 35, 36, 41, 47, 53, 59, 62, 65, 0x59616D61, ~0, (1 << 32) | 4),
    ),
    # TIOCSTI, TIOCSCTTY, TIOCLINUX, FIOASYNC, FIOSETOWN, SIOCSPGRP, FICLONE, FS_IOC_SETFLAGS, LOOP_CTL, KVM
    ("ioctl", 1): (
        (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x5401 | 1 << 32),
        (0x5412, 0x540E, 0x541C, 0x5452, 0x8901, 0x8902, 0x40049409, 0x40086602, 0x4C82, 0xAE01),
    ),
    # GETLK, OFD locks, SETOWN, GETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY, SETPIPE_SZ, ADD_SEALS, SET_RW_HINT
    ("fcntl", 1): (
        (0, 1, 2, 3, 4, 6, 7, 1030, 1032),
        (5, 36, 37, 38, 8, 9, 10, 15, 1024, 1026, 1031, 1033, 1036, ~0),
    ),
    ("madvise", 2): ((4, 8, 14), (12, 21, 25, 100, 101, 102, ~0)),
}
# OOB, DONTROUTE, ERRQUEUE, MORE, ZEROCOPY, FASTOPEN
FLAGS = (
    (0, 0x2, 0x40, 0x100, 0x4000, 0x4040, 0x40000000, 0x2 | 1 << 32),
    (0x1, 0x4, 0x2000, 0x8000, 0x4000000, 0x20000000, 0x41, ~0),
)
HARMLESS |= {("sendto", 3): FLAGS, ("recvfrom", 3): FLAGS, ("recvmsg", 2): FLAGS}


def test_calls_allow_harmless_arguments_only(run: Filter) -> None:
    for (name, place), (harmless, others) in HARMLESS.items():
        for verdict, values in ((ALLOW, harmless), (EPERM, others)):
            for value in values:
                assert run(name, *(0,) * place, value) == verdict, (name, hex(value))


def test_only_connected_socket_pairs_are_allowed(run: Filter) -> None:
    for kind in (1, 5, 1 | 0x800, 1 | 0x80000, 5 | 0x80800):
        assert run("socketpair", 1, kind, 0) == ALLOW
    # Datagrams could be sent on from a pair to any name; other families have pairs too (TIPC).
    for family, kind in ((1, 2), (1, 2 | 0x80000), (1, 3), (30, 1), (2, 1), (16, 1), (40, 1), (1, 1 | 0x10)):
        assert run("socketpair", family, kind, 0) == EPERM


def test_socket_options_are_harmless(run: Filter) -> None:
    assert run("setsockopt", 3, 1, 9) == ALLOW
    # Buffers, filters, forced buffers, busy polling
    for option in (7, 8, 26, 50, 32, 33, 46):
        assert run("setsockopt", 3, 1, option) == EPERM
    for option in (3, 4, 7, 8, 38, 39):
        assert run("getsockopt", 3, 1, option) == ALLOW
    # PEERCRED, PEERSEC, PEERGROUPS, PEERPIDFD, GET_FILTER
    for option in (17, 31, 59, 77, 26):
        assert run("getsockopt", 3, 1, option) == EPERM
    for level in (0, 6, 41, 280):  # other levels
        assert run("setsockopt", 3, level, 9) == run("getsockopt", 3, level, 4) == EPERM


def test_futexes_without_priority_inheritance(run: Filter) -> None:
    for operation in (0, 1, 3, 4, 5, 9, 10):
        for flags in (0, 128, 256, 384):
            assert run("futex", 0, operation | flags) == ALLOW
    for operation in (2, 6, 7, 8, 11, 12, 13, 14, 512, ~0):
        assert run("futex", 0, operation) == run("futex", 0, operation | 128) == ENOSYS


def test_changing_file_attributes_needs_an_own_uid(architecture: SyscallTable) -> None:
    for name in ATTRIBUTES & architecture.numbers.keys():
        assert Filter(POLICIES["plain"], architecture)(name) == EPERM
        assert Filter(POLICIES["own_uid"], architecture)(name) == ALLOW


def test_calls_with_a_libc_fallback_are_enosys(run: Filter) -> None:
    for name in ("clone3", "fchmodat2", "futex_waitv", "mseal", "statmount"):
        assert run(name) == ENOSYS
    for name in ("setxattr", "listxattr", "fgetxattr"):
        assert run(name) == 0x50000 | errno.EOPNOTSUPP


def test_filters_of_two_sessions_differ_only_in_the_pid(architecture: SyscallTable) -> None:
    mine, other = (bpf.instructions(assemble(SeccompPolicy(pid), architecture)) for pid in (PID, PID + 1))
    differences = [(one, two) for one, two in zip(mine, other, strict=True) if one != two]
    # kill, tkill, tgkill, prlimit64, sched_setaffinity, setpriority
    assert len(differences) == 6
    assert {(one[:3] == two[:3], one[3], two[3]) for one, two in differences} == {(True, PID, PID + 1)}


def test_long_tree_uses_long_jumps() -> None:
    rule = when(one_of(0, tuple(range(40))))
    verdicts: dict[int, Verdict] = {number: rule if number % 2 else ALLOW for number in range(60)}
    code = program(X86_64.audit, None, decide(verdicts, ENOSYS, 60))
    for number in range(64):
        arguments = [(39, ALLOW), (40, EPERM)] if number % 2 else [(0, ALLOW), (40, ALLOW)]
        for argument, expected in arguments:
            verdict = bpf.run(code, X86_64.audit, number, argument).verdict
            assert verdict == (expected if number < 60 else ENOSYS)


def test_filter_over_the_kernel_limit_is_refused() -> None:
    verdicts: dict[int, Verdict] = {number: when(one_of(0, tuple(range(200)))) for number in range(40)}
    with pytest.raises(ValueError, match="4096"):
        program(X86_64.audit, None, decide(verdicts, ENOSYS, 40))
