"""More processes, threads and priorities than a session may have."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from openenv_core.sandbox import Isolation

from .model import FILTERED, STRONG, attacks_held_at

attack = attacks_held_at(FILTERED)

ATTACKS = (
    attack("fork", "no second process is made by any call that makes one")("""
        def fork():
            pid = os.fork()
            if pid == 0:
                breach("a child lives")
                time.sleep(60)
            return pid
        must_fail("fork", fork)
        for name in ("fork", "vfork"):
            if name in CALLS:
                def raw():
                    pid = syscall(name)
                    if pid == 0:
                        os._exit(0)
                    return pid
                must_fail(name, raw)
        must_fail("forkpty", lambda: os.forkpty())
        """),
    attack("clone", "clone makes threads and nothing else, whatever its flags", ends="ok killed")("""
        def clone(flags):
            pid = syscall("clone", flags, 0, 0, 0, 0)
            if pid == 0:
                os._exit(0)
            return pid
        shared = (0x11, 0, 0x100 | 17, 0x200, 0x4000 | 17, 0x8000 | 17, 0x1000, 0x40000000 | 17, 0x20000000 | 17,
                  0x10000000 | 17, 0x10000000, 0x7C020000 | 17, 0x2000 | 17, 0x02000000 | 17, 0x80000000 | 17)
        for flags in (*shared, *((1 << bit) | 17 for bit in range(8, 32) if bit not in (16,))):
            must_fail(hex(flags), clone, flags)
        """),
    attack("clone3", "the newer clone is not there")("""
        import struct
        for flags in (0, 0x100, 0x10000000, 0x100000000, 0x200000000):
            def clone3():
                pid = syscall("clone3", struct.pack("=8Q", flags, 0, 0, 0, 17, 0, 0, 0), 64)
                if pid == 0:
                    os._exit(0)
                return pid
            must_fail(hex(flags), clone3)
        """),
    attack("fork-bomb", "the bomb does not go off")("""
        while True:
            try:
                os.fork()
            except OSError:
                break
        """),
    attack("subprocess", "no program is started")("""
        import subprocess, multiprocessing
        for call in (
            lambda: subprocess.run([sys.executable, "-c", "print(1)"], check=True),
            lambda: subprocess.run("id", shell=True, check=True),
            lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "id"], {}),
            lambda: os.posix_spawnp("id", ["id"], {}),
            lambda: os.popen("id").read() or 1 / 0,
            lambda: multiprocessing.get_context("fork").Process(target=print).start(),
            lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
            lambda: multiprocessing.get_context("forkserver").Process(target=print).start(),
        ):
            must_fail("a process", call)
        if os.system("true") == 0:
            breach("system")
        """),
    attack("execve", "the interpreter does not become another program")("""
        for path in ("/bin/sh", "/usr/bin/su", "/usr/bin/sudo", sys.executable):
            must_fail(path, lambda: os.execv(path, [path, "-c", "echo BREACH: executed"]))
            must_fail(path, lambda: syscall("execveat", -100, path.encode(), None, None, 0))
        with open("script", "w") as file:
            file.write("#!/bin/sh\\necho BREACH: executed\\n")
        attempt(os.chmod, "script", 0o755)
        must_fail("a script of its own", lambda: os.execv("./script", ["script"]))
        loader = "/lib64/ld-linux-x86-64.so.2"
        must_fail("the loader", lambda: os.execv(loader, [loader, "/bin/true"]))
        must_fail("by descriptor", lambda: os.execve(os.open("script", os.O_RDONLY), ["x"], {}))
        """),
    attack("daemon", "no process outlives the session in another one")("""
        def daemon():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(60)
                os._exit(0)
        must_fail("daemon", daemon)
        must_fail("setsid", os.setsid)
        must_fail("setpgid", lambda: os.setpgid(0, 1))
        must_fail("reaper", lambda: syscall("prctl", 36, 1, 0, 0, 0))
        """),
    attack("thread-bomb", "threads are counted", holds=STRONG)("""
        threading.stack_size(32768)
        started = 0
        try:
            while started < 5000:
                threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
                started += 1
        except RuntimeError:
            pass
        if started > 600:  # where the user is shared, others of it count, too
            breach(started, "threads")
        """),
    attack("raw-thread-bomb", "threads that Python knows nothing of are counted, too", holds=STRONG)("""
        import _thread
        _thread.stack_size(32768)
        started = 0
        try:
            for _ in range(5000):
                _thread.start_new_thread(time.sleep, (30,))
                started += 1
        except RuntimeError:
            pass
        if started > 600:  # where the user is shared, others of it count, too
            breach(started, "threads")
        """),
    attack(
        "thread-churn", "threads that come and go slow nobody", ends="timeout", timeout_s=0.3, holds=STRONG
    )("""
        while True:
            try:
                one = threading.Thread(target=int)
                one.start()
                one.join()
            except RuntimeError:
                pass
        """),
    attack("priority", "nobody becomes more important, or less", holds=STRONG | {Isolation.SECCOMP})("""
        must_fail("nice", os.nice, -5)
        must_fail("setpriority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
        for which, who in ((0, os.getppid()), (1, 0), (2, 0), (2, os.getuid()), (0, HOST["supervisor"]), (0, HOST["victim"]),
                           (1, os.getppid()), (0, 1)):
            if (which, who) != (0, os.getpid()):
                must_fail(f"setpriority {which} {who}", lambda: os.setpriority(which, who, 19))
        must_fail("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)))
        must_fail("round robin", lambda: os.sched_setparam(0, os.sched_param(1)))
        must_fail("deadline", lambda: syscall("sched_setattr", 0, bytes(48), 0))
        must_fail("ioprio", lambda: syscall("ioprio_set", 1, 0, 0x2000))
        must_fail("ioprio of the user", lambda: syscall("ioprio_set", 3, os.getuid(), 0x6000))
        """),
    attack("affinity-of-others", "other processes stay on their processors")("""
        for pid in (os.getppid(), HOST["supervisor"], HOST["victim"], HOST["zygote"], 1):
            if pid:
                must_fail(f"affinity of {pid}", lambda: os.sched_setaffinity(pid, {0}))
                must_fail(f"scheduler of {pid}", lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
        """),
    attack("unwaited", "waiting for processes finds none")("""
        must_fail("wait", os.wait)
        must_fail("waitpid", lambda: os.waitpid(-1, os.WNOHANG))
        must_fail("waitid of another", lambda: os.waitid(os.P_PID, HOST["victim"], os.WEXITED | os.WNOHANG))
        """),
)
