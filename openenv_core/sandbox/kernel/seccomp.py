"""System-call filters: the policy, and its compilation to a BPF program."""

import ctypes
import errno
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from . import libc
from .syscalls import SyscallTable, current

LOAD = 0x20
JUMP = 0x05
JUMP_EQUAL = 0x15
JUMP_AT_LEAST = 0x35
AND = 0x54
RETURN = 0x06

ALLOW = 0x7FFF_0000
KILL_PROCESS = 0x8000_0000
_ERRNO = 0x0005_0000

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ARGUMENTS_AT = 16

_LONGEST_JUMP = 255
_MAX_INSTRUCTIONS = 4096

Instruction = tuple[int, int, int, int]
"""Opcode, jump if true, jump if false, operand."""
Code = list[Instruction]


def answer(code: int) -> int:
    """Return the filter's return value that makes a call fail with an errno."""
    return _ERRNO | code


# A test of an argument is code that falls through if it holds, and otherwise jumps to the next alternative.
_MISS = -1  # placeholder of that jump, replaced once its distance is known


def one_of(argument: int, values: Iterable[int], mask: int = 0xFFFF_FFFF, *, high: bool = False) -> Code:
    """Test that the masked lower word of an argument is one of these values; if `high`, the upper word.

    The kernel ignores the upper word of an int. Both architectures are little-endian: the low word is first.
    """
    code: Code = [(LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4 * high)]
    if mask != 0xFFFF_FFFF:
        code.append((AND, 0, 0, mask))
    words = [value & 0xFFFF_FFFF for value in values]
    last = len(words) - 1
    return code + [
        (JUMP_EQUAL, last - index, _MISS if index == last else 0, value) for index, value in enumerate(words)
    ]


def only(argument: int, bits: int) -> Code:
    """Test that the lower word of an argument has no other bits than these."""
    return one_of(argument, (0,), mask=~bits & 0xFFFF_FFFF)


def none_of(argument: int, value: int) -> Code:
    """Test that an int argument is not this value."""
    return [(LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (JUMP_EQUAL, _MISS, 0, value)]


@dataclass(frozen=True)
class SeccompRule:
    """A rule on a call's arguments: all tests of one alternative must pass, or the call fails with an errno."""

    alternatives: tuple[tuple[Code, ...], ...]
    otherwise: int = errno.EPERM

    def code(self) -> Code:
        """Return code that returns the verdict."""
        code: Code = []
        for tests in self.alternatives:
            block = [instruction for test in tests for instruction in test]
            block.append((RETURN, 0, 0, ALLOW))
            for at, (op, true, false, value) in enumerate(block):
                miss = len(block) - at - 1
                code.append((op, miss if true == _MISS else true, miss if false == _MISS else false, value))
        return [*code, (RETURN, 0, 0, answer(self.otherwise))]


def when(*tests: Code) -> SeccompRule:
    """Return a rule with one alternative."""
    return SeccompRule((tests,))


Verdict = int | SeccompRule
"""The verdict on a call: a return value of the filter, or a rule on its arguments."""


def decide(verdicts: Mapping[int, Verdict], otherwise: int, last: int) -> Code:
    """Return a binary search over call numbers, which expects the number in the accumulator.

    If the number alone decides, the code loads nothing else. The kernel then answers the call from a bitmap, without
    running the filter.

    Args:
        verdicts: Verdicts by call number.
        otherwise: The verdict on all other numbers.
        last: The highest number in `verdicts`.
    """
    starts: list[tuple[int, Verdict]] = []
    for number in range(last + 2):
        verdict = verdicts.get(number, otherwise)
        if not starts or starts[-1][1] != verdict or isinstance(verdict, SeccompRule):
            starts.append((number, verdict))
    return _tree(starts)


def _tree(ranges: Sequence[tuple[int, Verdict]]) -> Code:
    if len(ranges) == 1:
        verdict = ranges[0][1]
        return verdict.code() if isinstance(verdict, SeccompRule) else [(RETURN, 0, 0, verdict)]
    middle = len(ranges) // 2
    low, high = _tree(ranges[:middle]), _tree(ranges[middle:])
    border = ranges[middle][0]
    if len(low) <= _LONGEST_JUMP:
        return [(JUMP_AT_LEAST, len(low), 0, border), *low, *high]
    return [(JUMP_AT_LEAST, 0, 1, border), (JUMP, 0, 0, len(low)), *low, *high]


def program(audit: int, foreign_from: int | None, tree: Code) -> bytes:
    """Return a filter: a foreign architecture or calling convention kills the process; the tree decides the rest."""
    code: Code = [
        (LOAD, 0, 0, _ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, _NUMBER_AT),
    ]
    if foreign_from is not None:
        code += [(JUMP_AT_LEAST, 0, 1, foreign_from), (RETURN, 0, 0, KILL_PROCESS)]
    code += tree
    if len(code) > _MAX_INSTRUCTIONS:
        raise ValueError(f"expected at most {_MAX_INSTRUCTIONS} instructions, got {len(code)}")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


@dataclass(frozen=True)
class SeccompPolicy:
    """The settings of a session's filter.

    Attributes:
        pid: The session's pid in its own namespace: signals may be sent only to it, or to its group (0). None leaves
            signals to uids, pid namespaces and Landlock; sessions that fork need that.
        allow_subprocess: Whether fork, vfork and execve are allowed.
        allow_fork: Whether fork is allowed without execve.
        groups: Whether processes may make process groups and sessions of their own. Something other than the group
            must then reach all of them. Otherwise they share the interpreter's group, and so may not signal it as 0,
            as `timeout` does.
        shared_uid: Whether other files on the machine belong to the same uid, and no namespace hides them. Landlock
            does not cover a file's mode, owner and times, so the filter then denies changing these.
    """

    pid: int | None
    allow_subprocess: bool = False
    allow_fork: bool = False
    groups: bool = False
    shared_uid: bool = True


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PLAIN = _names(
    """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat creat close
    close_range lseek stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat
    getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
    link linkat symlink symlinkat truncate ftruncate fsync fdatasync copy_file_range sendfile
    umask dup dup2 dup3 pipe pipe2 statfs fstatfs

    mmap munmap mprotect mremap brk msync

    set_robust_list set_tid_address rseq sched_yield sched_getaffinity sched_getparam
    sched_getscheduler sched_get_priority_max sched_get_priority_min arch_prctl exit exit_group
    restart_syscall wait4 waitid

    gettid getpid getppid getpgrp getpgid getsid getuid geteuid getgid getegid getresuid getresgid
    getgroups capget getpriority getrlimit setrlimit getrusage times uname sysinfo getcpu getrandom

    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause
    alarm getitimer setitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time

    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    eventfd eventfd2

    shutdown getsockname getpeername
    """
)
"""Allowed in every policy, whatever the arguments."""

ATTRIBUTES = _names("chmod fchmod fchmodat chown fchown lchown fchownat utime utimes futimesat utimensat")
"""Calls that change a file's mode, owner or times. Landlock does not cover them; a read-only descriptor suffices."""

# Extended attributes escape every quota, and fallocate fills a disk between two polls. "Not supported" is an error that
# shutil tolerates, and on which the C library falls back to writing.
UNSUPPORTED = _names(
    """
    fallocate
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
    lremovexattr fremovexattr
    """
)

# On ENOSYS the C library falls back to the older call, and `timeout` to an alarm; on EPERM they fail or complain. A
# timer could also send SIGKILL while the code is stopped, which would look like a kill from outside.
ABSENT = frozenset({"clone3", "timer_create"})
YOUNGEST_NEEDED = "futex_waitv"

_THREAD = 0x0001_0F00  # CLONE_VM, FS, FILES, SIGHAND, THREAD: without these it is a process
_THREAD_EXTRAS = 0x007C_0000  # SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED (musl)
_FORK = 0x0130_4100  # VM, VFORK, PARENT_SETTID, CHILD_CLEARTID, CHILD_SETTID
_SIGNAL_BITS = 0xFF
_SIGCHLD = 17

_AF_UNIX = 1
_SOCKET_TYPES = (1, 5)  # stream and seqpacket; a datagram socket could send to any address
_SOCKET_TYPE_FLAGS = 0x80800  # non-blocking, close-on-exec
_SOL_SOCKET = 1
# REUSEADDR, KEEPALIVE, LINGER, RCVTIMEO, SNDTIMEO; not SNDBUF and RCVBUF, whose memory no limit counts.
_SOCKET_OPTIONS = (2, 9, 13, 20, 21)
# Those above, and TYPE, ERROR, SNDBUF, RCVBUF, ACCEPTCONN, PROTOCOL, DOMAIN; not the peer's pidfd or credentials.
_SOCKET_FACTS = (*_SOCKET_OPTIONS, 3, 4, 7, 8, 30, 38, 39)
# PEEK, TRUNC, DONTWAIT, EOR, WAITALL, NOSIGNAL, CMSG_CLOEXEC. Attacks on the kernel's sockets use out-of-band data and
# sending descriptors (sendmsg), which nothing here needs.
_MESSAGE_FLAGS = 0x4000_41E2
# WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET; none with priority inheritance.
_FUTEX_OPERATIONS = (0, 1, 3, 4, 5, 9, 10)
_FUTEX_FLAGS = 0x180  # PRIVATE, CLOCK_REALTIME

# TCGETS, TIOCGWINSZ, FIONREAD, FIOCLEX, FIONCLEX, FIONBIO
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5451, 0x5450, 0x5421)
# DUPFD, GETFD, SETFD, GETFL, SETFL, SETLK, SETLKW, DUPFD_CLOEXEC, GETPIPE_SZ. Not the locks of open file descriptions
# (OFD), which outlive their descriptors in mappings and whose memory no limit counts. Neither flock nor GETLK, by which
# one session would see another's lock on a file that all sessions may read.
_FCNTLS = (0, 1, 2, 3, 4, 6, 7, 1030, 1032)
# Reads of PDEATHSIG, DUMPABLE, KEEPCAPS; SET_NAME, GET_NAME; reads of SECCOMP, CAPBSET, SECUREBITS, TIMERSLACK,
# CHILD_SUBREAPER; NO_NEW_PRIVS set and read; reads of TID_ADDRESS, THP_DISABLE; names for memory areas (VMA)
_PRCTLS = (2, 3, 7, 15, 16, 21, 23, 27, 30, 37, 38, 39, 40, 42, 0x53564D41)
# NORMAL to DONTNEED, FREE, REMOVE, DONTFORK, DOFORK, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP, WIPEONFORK,
# KEEPONFORK, POPULATE_READ, POPULATE_WRITE; not MERGEABLE (a side channel), PAGEOUT (slows others), HWPOISON.
_ADVICE = (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23)


def _rules(policy: SeccompPolicy) -> Iterator[tuple[str, Verdict]]:
    own = (0,) if policy.pid is None else (0, policy.pid)
    forks = policy.allow_subprocess or policy.allow_fork

    narrow = one_of(0, (0,), high=True)  # the flags of clone are a whole word
    thread = (narrow, only(0, _THREAD | _THREAD_EXTRAS), one_of(0, (_THREAD,), mask=_THREAD))
    fork = (narrow, only(0, _FORK | _SIGNAL_BITS), one_of(0, (0, _SIGCHLD), mask=_SIGNAL_BITS))
    yield "clone", SeccompRule((thread, fork)) if forks else when(*thread)
    if forks:
        yield from (("fork", ALLOW), ("vfork", ALLOW))
    if policy.allow_subprocess:
        yield "execve", ALLOW

    if policy.groups:
        yield from (("setpgid", ALLOW), ("setsid", ALLOW))
    if policy.pid is None:
        yield from (("tkill", ALLOW), ("tgkill", ALLOW))
        shares_group = policy.allow_subprocess and not policy.groups
        yield "kill", when(none_of(0, 0)) if shares_group else ALLOW
    else:
        yield "kill", when(one_of(0, own))
        yield "tkill", when(one_of(0, (policy.pid,)))
        yield "tgkill", when(one_of(0, (policy.pid,)))
    yield "prlimit64", when(one_of(0, own))
    yield "sched_setaffinity", when(one_of(0, own))
    yield "setpriority", when(one_of(0, (0,)), one_of(1, own))

    yield "prctl", when(one_of(0, _PRCTLS))
    yield "ioctl", when(one_of(1, _IOCTLS))
    yield "fcntl", when(one_of(1, _FCNTLS))
    yield "madvise", when(one_of(2, _ADVICE))
    yield (
        "socketpair",
        when(one_of(0, (_AF_UNIX,)), one_of(1, _SOCKET_TYPES, mask=0xFFFF_FFFF & ~_SOCKET_TYPE_FLAGS)),
    )
    yield "setsockopt", when(one_of(1, (_SOL_SOCKET,)), one_of(2, _SOCKET_OPTIONS))

    yield "getsockopt", when(one_of(1, (_SOL_SOCKET,)), one_of(2, _SOCKET_FACTS))
    yield "sendto", when(only(3, _MESSAGE_FLAGS))
    yield "recvfrom", when(only(3, _MESSAGE_FLAGS))
    yield "recvmsg", when(only(2, _MESSAGE_FLAGS))
    # libc probes for operations, and expects ENOSYS for a missing one.
    futex = one_of(1, _FUTEX_OPERATIONS, mask=0xFFFF_FFFF & ~_FUTEX_FLAGS)
    yield "futex", SeccompRule(((futex,),), otherwise=errno.ENOSYS)

    if not policy.shared_uid:
        yield from ((name, ALLOW) for name in ATTRIBUTES)


def verdicts(policy: SeccompPolicy, architecture: SyscallTable) -> dict[int, Verdict]:
    """Return the verdict on every call of an architecture's table."""
    numbers = architecture.numbers
    youngest = numbers[YOUNGEST_NEEDED]
    decided: dict[int, Verdict] = {
        number: answer(errno.ENOSYS if number >= youngest else errno.EPERM) for number in numbers.values()
    }
    named: dict[str, Verdict] = dict.fromkeys(PLAIN, ALLOW)
    named |= dict.fromkeys(ABSENT, answer(errno.ENOSYS))
    named |= dict.fromkeys(UNSUPPORTED, answer(errno.EOPNOTSUPP))
    named |= dict(_rules(policy))
    # Some architectures lack some of the older calls.
    decided |= {numbers[name]: verdict for name, verdict in named.items() if name in numbers}
    return decided


_SET_MODE_FILTER = 1
_TSYNC = 1
_SPEC_ALLOW = 4
_INSTRUCTION_BYTES = 8


# Placeholder: no process has this pid, since pids end at 2**22, and no rule compares another value with it.
_SOME_PID = 0x5EED_C0DE


def assemble(policy: SeccompPolicy, architecture: SyscallTable | None = None) -> bytes:
    """Return a policy's filter, by default for this machine's architecture."""
    if policy.pid is None:
        return _assembled(policy, architecture)
    # Sessions differ only in their pid, and assembling a filter takes some milliseconds.
    template = _assembled(replace(policy, pid=_SOME_PID), architecture)
    return template.replace(struct.pack("=I", _SOME_PID), struct.pack("=I", policy.pid))


@lru_cache(maxsize=64)
def _assembled(policy: SeccompPolicy, architecture: SyscallTable | None) -> bytes:
    architecture = architecture or current()
    absent = answer(errno.ENOSYS)  # gaps in the table, and all newer calls
    tree = decide(verdicts(policy, architecture), absent, architecture.last)
    return program(architecture.audit, architecture.foreign_from, tree)


def install(filter_code: bytes) -> None:
    """Install a filter permanently on every thread of this process, after setting no_new_privs."""
    libc.no_new_privileges()
    buffer = ctypes.create_string_buffer(filter_code, len(filter_code))
    # struct sock_fprog: length in instructions, filter
    fprog = struct.pack("@HP", len(filter_code) // _INSTRUCTION_BYTES, ctypes.addressof(buffer))
    # SPEC_ALLOW: without it, kernels before 5.16 slow down every filtered process, even pure Python loops.
    flags = _TSYNC | _SPEC_ALLOW
    stray = libc.call("seccomp", _SET_MODE_FILTER, flags, fprog, step="seccomp filter")
    if stray:
        raise OSError(
            errno.EBUSY, f"seccomp filter: thread {stray} has another filter and cannot take this one"
        )
