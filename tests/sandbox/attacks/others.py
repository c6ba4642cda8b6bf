"""Memory and descriptors of other processes, and the kernel's means to look into them."""

from .model import FILTERED, STRONG, attacks_held_at

attack = attacks_held_at(FILTERED)

ATTACKS = (
    attack("ptrace", "no process is traced")("""
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid(), 1):
            for request in (0, 1, 2, 3, 8, 12, 16, 0x4200, 0x4206, 0x4207, 0x420E):
                must_fail(f"ptrace {request} {pid}", lambda: syscall("ptrace", request, pid, 0, 0))
        """),
    attack("process-vm", "no memory of others is read or written")("""
        import struct
        buffer = ctypes.create_string_buffer(64)
        local = struct.pack("=QQ", ctypes.addressof(buffer), 64)
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid(), 1):
            for name in ("process_vm_readv", "process_vm_writev"):
                must_fail(name, lambda: syscall(name, pid, local, 1, local, 1, 0))
        """),
    attack("proc-mem", "/proc gives no memory, not even the session's own", holds=STRONG)("""
        for pid in ("self", HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid(), 1):
            for name in ("mem", "maps", "smaps", "pagemap", "clear_refs", "oom_score_adj", "coredump_filter", "stack"):
                must_fail(name, lambda: os.open(f"/proc/{pid}/{name}", os.O_RDWR))
                must_fail(name, lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        """),
    attack("pidfd-getfd", "no descriptor is taken from others")("""
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid(), 1):
            must_fail("pidfd_open", lambda: syscall("pidfd_open", pid, 0))
        for descriptor in range(8):
            must_fail("pidfd_getfd", lambda: syscall("pidfd_getfd", 3, descriptor, 0))
        must_fail("process_madvise", lambda: syscall("process_madvise", 3, None, 0, 4, 0))
        must_fail("process_mrelease", lambda: syscall("process_mrelease", 3, 0))
        """),
    attack("kcmp", "the kernel does not compare processes")("""
        for kind in range(8):
            must_fail("kcmp", lambda: syscall("kcmp", os.getpid(), HOST["supervisor"], kind, 0, 0))
        """),
    attack("limits-of-others", "limits of others stay, and the session's own are not raised")("""
        import resource, struct
        none = struct.pack("=QQ", 0, 0)
        for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"], os.getppid(), 1):
            if pid:
                for which in range(16):
                    must_fail("prlimit", lambda: syscall("prlimit64", pid, which, none, None))
        for which in range(16):
            soft, hard = resource.getrlimit(which)
            if hard != resource.RLIM_INFINITY:
                must_fail(f"limit {which} raised", lambda: resource.setrlimit(which, (hard + 1, hard + 1)))
        """),
    attack("observing-the-machine", "neither perf nor bpf nor tracing is there")("""
        for name, arguments in {
            "perf_event_open": (bytes(128), 0, -1, -1, 0), "bpf": (5, bytes(128), 128), "userfaultfd": (0,),
            "fanotify_init": (0, 0), "inotify_init1": (0,), "lookup_dcookie": (0, bytes(8), 8),
            "syslog": (3, bytes(4096), 4096), "quotactl": (0, None, 0, None), "get_mempolicy": (None, None, 0, 0, 0),
            "migrate_pages": (0, 0, None, None), "move_pages": (0, 0, None, None, None, 0), "acct": (b"x",),
            "rseq": (None, 0, 1, 0) , "membarrier": (1, 0, 0), "cachestat": (3, None, None, 0),
        }.items():
            if name in CALLS:
                must_fail(name, lambda: syscall(name, *arguments))
        """),
    attack("keys", "the kernel keeps no secret for or from the session")("""
        for ring in (-1, -2, -3, -4, -5):
            must_fail("add_key", lambda: syscall("add_key", b"user", b"x", b"x", 1, ring))
            must_fail("keyctl", lambda: syscall("keyctl", 0, ring, 1, 0, 0))
        must_fail("request_key", lambda: syscall("request_key", b"user", b"x", None, -4))
        must_fail("join", lambda: syscall("keyctl", 1, None, 0, 0, 0))
        """),
    attack("system-v", "no memory, semaphore or queue of the machine is found or made")("""
        import struct
        for key in (0, HOST["shared_memory"]):
            for flags in (0, 0o1666):
                must_fail("shmget", lambda: syscall("shmget", key, 4096, flags))
                must_fail("semget", lambda: syscall("semget", key, 1, flags))
                must_fail("msgget", lambda: syscall("msgget", key, flags))
        for number in range(64):
            must_fail("shmat", lambda: syscall("shmat", number, None, 0))
            must_fail("shmctl", lambda: syscall("shmctl", number, 0, None))
        must_fail("mq_open", lambda: syscall("mq_open", b"x", 0o102, 0o666, None))
        """),
    attack("descriptors-left-open", "the session has its streams and its channel, and nothing else")("""
        import fcntl
        known = {0, 1, 2, 3, *HOST.get("channels", ())}
        for descriptor in (*range(0, 70_000), *range(1 << 20, (1 << 20) + 100)):
            try:
                fcntl.fcntl(descriptor, fcntl.F_GETFD)
            except OSError:
                continue
            if descriptor not in known:
                breach("descriptor", descriptor, attempt(os.fstat, descriptor))
        """),
    attack("secrets-in-memory", "nothing of the server's memory or environment came along", holds=STRONG)("""
        import gc, re
        pattern = re.compile(b"CANARY" + b"-([0-9a-f]{32})")
        start = id(object())
        libc = ctypes.CDLL(None)
        pipe = os.pipe()
        page, found = 4096, []

        def readable(address):
            # The kernel says whether there is memory, without a crash.
            try:
                syscall("write", pipe[1], address, page)
            except OSError:
                return None
            return os.read(pipe[0], page)

        for begin in (start, id(os), id(sys.modules), ctypes.addressof(ctypes.c_int.in_dll(libc, "opterr")), id(type),
                      ctypes.addressof(ctypes.c_void_p.in_dll(libc, "environ")),
                      ctypes.cast(ctypes.c_void_p.in_dll(libc, "environ"), ctypes.c_void_p).value or start):
            begin &= -page
            for step in range(-1500, 1500):
                data = readable(begin + step * page)
                if data and (match := pattern.search(data)):
                    found.append(match.group())
        for each in (os.environ, os.environb, sys.argv, getattr(sys, "orig_argv", ())):
            if pattern.search(repr(dict(each) if hasattr(each, "items") else each).encode()):
                found.append(repr(each))
        for each in gc.get_objects():
            if type(each) is dict:
                for value in list(each.values()):
                    if type(value) is str and pattern.search(value.encode("utf-8", "replace")):
                        found.append(value)
        if found:
            breach("secrets", set(found))
        """),
)
