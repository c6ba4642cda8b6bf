"""Signals to others, and a session's own signals turned against whoever has to stop it."""

from .model import EVERYWHERE, FILTERED, STRONG, Attack

ATTACKS = (
    Attack(
        name="kill-supervisor",
        contained="neither the server nor the zygote nor the first process hears of it",
        code="""
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid()):
            if pid:
                for number in (0, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT, signal.SIGUSR1, 64):
                    must_fail(f"kill {pid} {number}", os.kill, pid, number)
        """,
        holds=FILTERED,
    ),
    Attack(
        name="kill-everybody",
        contained="no process of the machine is reached by its number",
        code="""
        own = os.getpid()
        for pid in (*range(2, 3000), *range(3000, 70000, 7)):
            if pid != own:
                try:
                    os.kill(pid, signal.SIGSTOP)
                except OSError:
                    continue
                breach("stopped", pid)
        """,
    ),
    Attack(
        name="kill-all-at-once",
        contained="what reaches many reaches at most the session",
        code="""
        must_fail("kill -1", os.kill, -1, signal.SIGKILL)
        group = attempt(os.getpgid, os.getppid())
        if group:  # 0 is one that this name space does not see, and means the session itself
            must_fail("group of the parent", os.killpg, group, signal.SIGKILL)
        must_fail("group 1", os.killpg, 1, signal.SIGKILL)
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"]):
            must_fail("group", os.killpg, pid, signal.SIGKILL)
        must_fail("INT_MIN", lambda: syscall("kill", -0x80000000, 9))
        """,
        holds=FILTERED,
    ),
    Attack(
        name="kill-own-group",
        contained="its own group is the session alone",
        code="os.kill(0, signal.SIGKILL)",
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="other-calls",
        contained="no other call that signals reaches anybody",
        code="""
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
        """,
        holds=FILTERED,
    ),
    Attack(
        name="asynchronous-signals",
        contained="no descriptor or timer signals in the session's place",
        code="""
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
        """,
        holds=FILTERED,
    ),
    Attack(
        name="stop-itself",
        contained="a session that stops itself is continued or ended, in time",
        code="os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(30)",
        timeout_s=0.2,
        ends=("timeout", "error"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="ignored-interrupt",
        contained="an ignored interrupt is followed by a kill",
        code="""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="blocked-signals",
        contained="blocked signals are followed by a kill",
        code="""
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        while True:
            time.sleep(1)
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="own-handler",
        contained="a handler of its own does not keep the session running",
        code="""
        signal.signal(signal.SIGINT, lambda *_: time.sleep(30))
        time.sleep(30)
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="alarm",
        contained="alarms end the session alone",
        code="""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(5)
        """,
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="alarm-between-cells",
        contained="an alarm that goes off while nothing runs is told with the next execution",
        code=(
            "signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.setitimer(signal.ITIMER_REAL, 0.05)",
            "time.sleep(0.2)",
        ),
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="interrupt-storm",
        contained="the code's own interrupts neither fool nor harm the runner",
        code="""
        def storm():
            for _ in range(2000):
                os.kill(os.getpid(), signal.SIGINT)
        for _ in range(20):
            try:
                storm()
            except KeyboardInterrupt:
                pass
        """,
        ends=("ok", "error"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="outlive-parent",
        contained="the session cannot decide to outlive the zygote",
        code="""
        must_fail("PR_SET_PDEATHSIG", lambda: syscall("prctl", 1, 0, 0, 0, 0))
        must_fail("PR_SET_DUMPABLE", lambda: syscall("prctl", 4, 1, 0, 0, 0))
        must_fail("PR_SET_KEEPCAPS", lambda: syscall("prctl", 8, 1, 0, 0, 0))
        must_fail("PR_SET_MM", lambda: syscall("prctl", 35, 1, 0, 0, 0))
        must_fail("PR_SET_PTRACER", lambda: syscall("prctl", 0x59616D61, -1, 0, 0, 0))
        must_fail("PR_SET_SECUREBITS", lambda: syscall("prctl", 28, 0, 0, 0, 0))
        must_fail("PR_TASK_PERF_EVENTS_DISABLE", lambda: syscall("prctl", 31, 0, 0, 0, 0))
        must_fail("PR_SCHED_CORE", lambda: syscall("prctl", 62, 1, 0, 0, 0))
        must_fail("PR_SET_SYSCALL_USER_DISPATCH", lambda: syscall("prctl", 59, 1, 0, 0, 0))
        """,
        holds=FILTERED,
    ),
    Attack(
        name="own-signals",
        contained="a session may end itself by any signal, and that is told",
        code="os.kill(os.getpid(), signal.SIGSEGV)",
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="crash-storm",
        contained="crashes cost nobody else anything",
        code="ctypes.string_at(0)",
        ends=("killed",),
        survives=False,
        holds=STRONG,
    ),
)
