"""Which system calls a session may make: an allow-list, so that what nobody thought of is refused.

The list is what CPython, its standard library, numpy, matplotlib and threads were seen to need on files,
memory and threads of their own. Whatever reaches other processes, the network, the machine's settings or
kernel features beyond that is absent, and absent means refused.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from .bpf import ALLOW, AllOf, OneOf, Only, Rule, Verdict, answer, when
from .syscalls import Architecture


@dataclass(frozen=True)
class Policy:
    """What one session's filter depends on.

    Attributes:
        pid: The session's own pid as it sees itself: signals go to it, or to its group (0), alone. None
            leaves signals to what uids, pid namespaces and Landlock allow; sessions that fork need that.
        allow_subprocess: fork, vfork and execve are allowed.
        allow_fork: fork is allowed, execve is not.
        shared_uid: Other files on the machine belong to this very uid, and no namespace hides them. Landlock
            has no say in a file's mode, owner and times, so those stay as they are.
    """

    pid: int | None
    allow_subprocess: bool = False
    allow_fork: bool = False
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
"""Allowed whatever the arguments are, in every policy."""

ATTRIBUTES = _names("chmod fchmod fchmodat chown fchown lchown fchownat utime utimes futimesat utimensat")
"""A file's mode, owner and times: by name they reach past Landlock, and through a read-only descriptor too."""

# Extended attributes are outside every quota, and reserved space fills a disk before anybody has looked; "not
# supported" is what shutil takes as an answer, and the C library, which then writes instead.
UNSUPPORTED = _names(
    """
    fallocate
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
    lremovexattr fremovexattr
    """
)

# The C library falls back on the older call when it hears ENOSYS, and gives up when it hears EPERM.
ABSENT = frozenset({"clone3"})
YOUNGEST_NEEDED = "futex_waitv"

_THREAD = 0x0001_0F00  # CLONE_VM, FS, FILES, SIGHAND, THREAD: without these it is a process
_THREAD_EXTRAS = 0x007C_0000  # SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED (musl)
_FORK = 0x0130_4100  # VM, VFORK, PARENT_SETTID, CHILD_CLEARTID, CHILD_SETTID
_SIGNAL_BITS = 0xFF
_SIGCHLD = 17

_AF_UNIX = 1
_SOCKET_TYPES = (1, 5)  # stream and seqpacket; a datagram socket could be sent on to any other name
_SOCKET_TYPE_FLAGS = 0x80800  # non-blocking, close-on-exec
_SOL_SOCKET = 1
# REUSEADDR, KEEPALIVE, LINGER, RCVTIMEO, SNDTIMEO: not SNDBUF and RCVBUF, whose memory no limit counts
_SOCKET_OPTIONS = (2, 9, 13, 20, 21)
# Without the peer's pidfd or credentials: TYPE and ERROR, SNDBUF, RCVBUF, those above, ACCEPTCONN, PROTOCOL, DOMAIN
_SOCKET_FACTS = (*_SOCKET_OPTIONS, 3, 4, 7, 8, 30, 38, 39)
# PEEK, TRUNC, DONTWAIT, EOR, WAITALL, NOSIGNAL, CMSG_CLOEXEC. Sending descriptors (sendmsg) and out-of-band bytes
# is what attacks on the kernel's sockets are made of, and what nothing here needs.
_MESSAGE_FLAGS = 0x4000_41E2
# WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, and the two of bit sets: none with priority inheritance
_FUTEX_OPERATIONS = (0, 1, 3, 4, 5, 9, 10)
_FUTEX_FLAGS = 0x180  # private, by the real-time clock

# TCGETS, TIOCGWINSZ, FIONREAD, FIOCLEX, FIONCLEX, FIONBIO
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5451, 0x5450, 0x5421)
# DUPFD, GETFD, SETFD, GETFL, SETFL, SETLK, SETLKW, DUPFD_CLOEXEC, GETPIPE_SZ: not the locks of open files
# (OFD), which outlive their descriptors in mappings and whose memory no limit counts. Neither flock nor GETLK: on
# files that all sessions may read, one session would see another's lock.
_FCNTLS = (0, 1, 2, 3, 4, 6, 7, 1030, 1032)
# Reads of PDEATHSIG, DUMPABLE, KEEPCAPS; SET_NAME, GET_NAME; reads of SECCOMP, CAPBSET, SECUREBITS, TIMERSLACK,
# CHILD_SUBREAPER; NO_NEW_PRIVS set and read; reads of TID_ADDRESS, THP_DISABLE; names for memory areas (VMA)
_PRCTLS = (2, 3, 7, 15, 16, 21, 23, 27, 30, 37, 38, 39, 40, 42, 0x53564D41)
# NORMAL to DONTNEED, FREE, REMOVE, DONTFORK, DOFORK, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP, WIPEONFORK,
# KEEPONFORK, POPULATE_READ, POPULATE_WRITE: not MERGEABLE (a side channel), PAGEOUT (slows others), HWPOISON
_ADVICE = (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23)


def _rules(policy: Policy) -> Iterator[tuple[str, Verdict]]:
    own = (0,) if policy.pid is None else (0, policy.pid)
    forks = policy.allow_subprocess or policy.allow_fork

    thread = (Only(0, _THREAD | _THREAD_EXTRAS, wide=True), AllOf(0, _THREAD))
    fork = (Only(0, _FORK | _SIGNAL_BITS, wide=True), OneOf(0, (0, _SIGCHLD), mask=_SIGNAL_BITS))
    yield "clone", Rule((thread, fork)) if forks else when(*thread)
    if forks:
        yield from ((name, ALLOW) for name in ("fork", "vfork"))
    if policy.allow_subprocess:
        yield "execve", ALLOW

    if policy.pid is None:
        yield from ((name, ALLOW) for name in ("kill", "tkill", "tgkill"))
    else:
        yield "kill", when(OneOf(0, own))
        yield "tkill", when(OneOf(0, (policy.pid,)))
        yield "tgkill", when(OneOf(0, (policy.pid,)))
    yield "prlimit64", when(OneOf(0, own))
    yield "sched_setaffinity", when(OneOf(0, own))
    yield "setpriority", when(OneOf(0, (0,)), OneOf(1, own))

    yield "prctl", when(OneOf(0, _PRCTLS))
    yield "ioctl", when(OneOf(1, _IOCTLS))
    yield "fcntl", when(OneOf(1, _FCNTLS))
    yield "madvise", when(OneOf(2, _ADVICE))
    yield (
        "socketpair",
        when(OneOf(0, (_AF_UNIX,)), OneOf(1, _SOCKET_TYPES, mask=0xFFFF_FFFF & ~_SOCKET_TYPE_FLAGS)),
    )
    yield "setsockopt", when(OneOf(1, (_SOL_SOCKET,)), OneOf(2, _SOCKET_OPTIONS))

    yield "getsockopt", when(OneOf(1, (_SOL_SOCKET,)), OneOf(2, _SOCKET_FACTS))
    yield "sendto", when(Only(3, _MESSAGE_FLAGS))
    yield "recvfrom", when(Only(3, _MESSAGE_FLAGS))
    yield "recvmsg", when(Only(2, _MESSAGE_FLAGS))
    # Probing for an operation that is not there, libc expects ENOSYS.
    futex = OneOf(1, _FUTEX_OPERATIONS, mask=0xFFFF_FFFF & ~_FUTEX_FLAGS)
    yield "futex", Rule(((futex,),), otherwise=errno.ENOSYS)

    if not policy.shared_uid:
        yield from ((name, ALLOW) for name in ATTRIBUTES)


def verdicts(policy: Policy, architecture: Architecture) -> dict[int, Verdict]:
    """The verdict on every call that the table of an architecture names."""
    numbers = architecture.numbers
    youngest = numbers[YOUNGEST_NEEDED]
    decided: dict[int, Verdict] = {
        number: answer(errno.ENOSYS if number >= youngest else errno.EPERM) for number in numbers.values()
    }
    named: dict[str, Verdict] = dict.fromkeys(PLAIN, ALLOW)
    named |= dict.fromkeys(ABSENT, answer(errno.ENOSYS))
    named |= dict.fromkeys(UNSUPPORTED, answer(errno.EOPNOTSUPP))
    named |= dict(_rules(policy))
    # An architecture without one of the older calls has nothing to decide about it.
    decided |= {numbers[name]: verdict for name, verdict in named.items() if name in numbers}
    return decided
