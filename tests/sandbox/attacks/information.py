"""What a session learns of the machine that is not its business."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from openenv_core.sandbox import Isolation

from .model import EVERYWHERE, STRONG, Stage, attacks_held_at


async def tracebacks(stage: Stage) -> None:
    """Errors of the interpreter's own parts do not show where the server lies."""
    for code in (
        "1 / 0",
        "open('/etc/shadow')",
        "raise SystemExit(3)",
        "x = (",
        "display(type('X', (), {'__repr__': 1})())",
    ):
        done = await stage.session.execute(code, timeout_s=20.0)
        stage.executions.append(done)
        traceback_text = "".join(done.error.traceback) if done.error else ""
        for path in stage.host["ours"]:
            if path in traceback_text:
                stage.breaches.append(f"the traceback of {code!r} names {path}")


attack = attacks_held_at(STRONG)

ATTACKS = (
    attack("environment", "the environment is a small one of the sandbox's own", holds=EVERYWHERE)("""
        allowed = {"PATH", "LANG", "HOME", "PYTHONDONTWRITEBYTECODE", "MPLBACKEND", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
                   "MKL_NUM_THREADS", "TMPDIR", "MPLCONFIGDIR", "PWD", "LC_CTYPE", "TZ", "NUMEXPR_NUM_THREADS",
                   "VECLIB_MAXIMUM_THREADS"}
        more = set(os.environ) - allowed
        if more:
            breach("variables", more)
        """),
    attack("processes", "the processes of the machine are not listed")("""
        for listed in (attempt(os.listdir, "/proc"), attempt(lambda: [each.name for each in os.scandir("/proc")])):
            if numbers := [name for name in listed or () if name.isdecimal()]:
                breach("listing", numbers)
        """),
    attack(
        "processes-by-number",
        "it does not learn which numbers exist",
        holds=frozenset({Isolation.NAMESPACES}),
    )("""
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"]):
            must_fail("stat", os.stat, f"/proc/{pid}")
            must_fail("getpgid", os.getpgid, pid)
            must_fail("getpriority", os.getpriority, 0, pid)
        if os.getpid() > 100:
            breach("a number of the machine's")
        """),
    attack("host-files", "it does not learn which files exist", holds=frozenset({Isolation.NAMESPACES}))("""
        for path in (HOST["canary"], HOST["folder"], "/etc/shadow", "/etc/passwd", "/root/.ssh", "/home", "/var", "/proc/1"):
            must_fail(path, os.stat, path)
        """),
    attack("names", "in name spaces of its own the network of the machine has no names")("""
        for path in ("/sys/class/net", "/proc/net/dev", "/proc/self/net/tcp", "/etc/hosts", "/etc/resolv.conf", "/etc/machine-id",
                     "/var/run/secrets", "/run/secrets/kubernetes.io/serviceaccount/token", "/.dockerenv", "/proc/1/cgroup"):
            must_fail(path, lambda: open(path).read())
            must_fail(path, os.listdir, path)
        must_fail("interfaces", socket.if_nameindex)
        must_fail("cloud metadata", lambda: socket.create_connection(("169.254.169.254", 80), 0.3))
        """),
    attack("kernel-log", "the kernel's log and addresses are not told")("""
        must_fail("syslog", lambda: syscall("syslog", 3, bytes(1000), 1000))
        for path in ("/proc/kallsyms", "/proc/modules", "/proc/cmdline", "/proc/config.gz", "/proc/partitions", "/sys/kernel/notes",
                     "/boot", "/proc/iomem", "/proc/timer_list", "/proc/sched_debug", "/proc/interrupts", "/proc/vmstat"):
            if attempt(lambda: open(path, "rb").read(100)):
                breach("read", path)
        """),
    attack("tracebacks", "none shows a frame of the interpreter's own", ends="ok error", holds=EVERYWHERE)(
        tracebacks
    ),
    attack("other-peoples-words", "the terminal, its history and logins are not seen")("""
        for path in ("/var/run/utmp", "/var/log", "/root/.bash_history", "/var/log/syslog", "/etc/ssh", "/dev/tty", "/var/spool"):
            must_fail(path, lambda: open(path, "rb").read(10))
            must_fail(path, os.listdir, path)
        """),
    attack("mincore", "which pages of shared files others use is not told")("""
        import mmap
        file = os.open(json.__file__, os.O_RDONLY)
        one = mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(one))
        must_fail("mincore", lambda: syscall("mincore", address, 4096, ctypes.create_string_buffer(16)))
        """),
)
