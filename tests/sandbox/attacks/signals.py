"""Signals to others, and a session's own signals turned against whoever has to stop it."""

from .model import EVERYWHERE, FILTERED, STRONG, attacks_held_at

attack = attacks_held_at(EVERYWHERE)

ATTACKS = (
    attack("kill-supervisor", "neither server nor zygote nor first process hears of it", holds=FILTERED)("""
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid()):
            if pid:
                for number in (0, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT, signal.SIGUSR1, 64):
                    must_fail(f"kill {pid} {number}", os.kill, pid, number)
        """),
    attack("kill-everybody", "no process of the machine is reached by its number", holds=STRONG)("""
        own = os.getpid()
        for pid in (*range(2, 3000), *range(3000, 70000, 7)):
            if pid != own:
                try:
                    os.kill(pid, signal.SIGSTOP)
                except OSError:
                    continue
                breach("stopped", pid)
        """),
    attack("kill-all-at-once", "what reaches many reaches at most the session", holds=FILTERED)("""
        must_fail("kill -1", os.kill, -1, signal.SIGKILL)
        group = attempt(os.getpgid, os.getppid())
        if group:  # 0 is one that this name space does not see, and means the session itself
            must_fail("group of the parent", os.killpg, group, signal.SIGKILL)
        must_fail("group 1", os.killpg, 1, signal.SIGKILL)
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"]):
            must_fail("group", os.killpg, pid, signal.SIGKILL)
        must_fail("INT_MIN", lambda: syscall("kill", -0x80000000, 9))
        """),
    attack("kill-own-group", "its own group is the session alone", ends="killed")(
        "os.kill(0, signal.SIGKILL)"
    ),
    attack("other-calls", "no other call that signals reaches anybody", holds=FILTERED)("""
        import struct
        info = struct.pack("=iii", signal.SIGKILL, 0, -1) + bytes(116)
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid(), 1):
            if pid:
                must_fail("tkill", lambda: syscall("tkill", pid, 9))
                must_fail("tgkill", lambda: syscall("tgkill", pid, pid, 9))
                must_fail("tgkill of own group", lambda: syscall("tgkill", os.getpid(), pid, 9))
                must_fail("sigqueue", lambda: syscall("rt_sigqueueinfo", pid, 9, info))
                must_fail("tgsigqueue", lambda: syscall("rt_tgsigqueueinfo", pid, pid, 9, info))
                must_fail("pidfd_open", lambda: os.pidfd_open(pid))
                must_fail("pidfd_send_signal", lambda: syscall("pidfd_send_signal", 3, 9, None, 0))
        must_fail("pidfd of itself", lambda: syscall("pidfd_send_signal", -10000, 9, None, 0))
        """),
    attack(
        "asynchronous-signals", "no descriptor or timer signals instead of the session", holds=FILTERED
    )("""
        import fcntl
        one, other = socket.socketpair()
        for pid in (HOST["supervisor"], HOST["victim"], -1, os.getppid()):
            must_fail("F_SETOWN", fcntl.fcntl, one.fileno(), fcntl.F_SETOWN, pid)
            must_fail("FIOSETOWN", fcntl.ioctl, one.fileno(), 0x8901, bytes(4))
            must_fail("SIOCSPGRP", fcntl.ioctl, one.fileno(), 0x8902, bytes(4))
        must_fail("F_SETOWN_EX", fcntl.fcntl, one.fileno(), 15, bytes(8))
        must_fail("F_SETSIG", fcntl.fcntl, one.fileno(), fcntl.F_SETSIG, 9)
        must_fail("F_NOTIFY", fcntl.fcntl, os.open(".", os.O_RDONLY), fcntl.F_NOTIFY, 0x7)
        must_fail("timer_create", lambda: syscall("timer_create", 0, bytes(64), bytes(8)))
        must_fail("lease", fcntl.fcntl, 1, fcntl.F_SETLEASE, 0)
        """),
    attack("stop-itself", "it is continued or ended, in time", ends="timeout error", timeout_s=0.2)(
        "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(30)"
    ),
    attack(
        "ignored-interrupt", "an ignored interrupt is followed by a kill", ends="timeout", timeout_s=0.2
    )("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
        """),
    attack("blocked-signals", "blocked signals are followed by a kill", ends="timeout", timeout_s=0.2)("""
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        while True:
            time.sleep(1)
        """),
    attack("own-handler", "a handler of its own does not keep it running", ends="timeout", timeout_s=0.2)("""
        signal.signal(signal.SIGINT, lambda *_: time.sleep(30))
        time.sleep(30)
        """),
    attack("alarm", "alarms end the session alone", ends="killed")("""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(5)
        """),
    attack(
        "alarm-between-cells", "an alarm while nothing runs is told with the next execution", ends="killed"
    )(
        "signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.setitimer(signal.ITIMER_REAL, 0.05)",
        "time.sleep(0.2)",
    ),
    attack(
        "interrupt-storm",
        "its own interrupts neither fool nor harm the runner",
        ends="ok error",
        survives=None,
    )("""
        def storm():
            for _ in range(2000):
                os.kill(os.getpid(), signal.SIGINT)
        for _ in range(20):
            try:
                storm()
            except KeyboardInterrupt:
                pass
        """),
    attack("outlive-parent", "the session cannot decide to outlive the zygote", holds=FILTERED)("""
        must_fail("PR_SET_PDEATHSIG", lambda: syscall("prctl", 1, 0, 0, 0, 0))
        must_fail("PR_SET_DUMPABLE", lambda: syscall("prctl", 4, 1, 0, 0, 0))
        must_fail("PR_SET_KEEPCAPS", lambda: syscall("prctl", 8, 1, 0, 0, 0))
        must_fail("PR_SET_MM", lambda: syscall("prctl", 35, 1, 0, 0, 0))
        must_fail("PR_SET_PTRACER", lambda: syscall("prctl", 0x59616D61, -1, 0, 0, 0))
        must_fail("PR_SET_SECUREBITS", lambda: syscall("prctl", 28, 0, 0, 0, 0))
        must_fail("PR_TASK_PERF_EVENTS_DISABLE", lambda: syscall("prctl", 31, 0, 0, 0, 0))
        must_fail("PR_SCHED_CORE", lambda: syscall("prctl", 62, 1, 0, 0, 0))
        must_fail("PR_SET_SYSCALL_USER_DISPATCH", lambda: syscall("prctl", 59, 1, 0, 0, 0))
        """),
    attack("own-signals", "a session may end itself by any signal, and that is told", ends="killed")(
        "os.kill(os.getpid(), signal.SIGSEGV)"
    ),
    attack("crash-storm", "crashes cost nobody else anything", ends="killed", holds=STRONG)(
        "ctypes.string_at(0)"
    ),
)
