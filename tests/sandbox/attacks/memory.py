"""More memory than a session may have, by every way to have some."""

from .model import EVERYWHERE, FILTERED, STRONG, attacks_held_at

attack = attacks_held_at(EVERYWHERE)

ATTACKS = (
    attack("one-large", "eight gigabytes are refused, and told as a lack of memory", ends="memory")(
        "bytearray(8 << 30)"
    ),
    attack("many-small", "small objects end where large ones do", ends="memory killed", timeout_s=15.0)("""
        held = []
        while True:
            held.append(bytearray(1 << 16))
        """),
    attack(
        "tiny-objects", "objects of a few bytes end there, too", ends="memory killed timeout", timeout_s=0.6
    )("""
        held = []
        while True:
            held = [held, held]
            held += [[object()] for _ in range(1000)]
        """),
    attack("swallowed", "a lack of memory that is caught is still one", timeout_s=15.0)("""
        held = []
        for _ in range(3000):
            try:
                held.append(bytearray(1 << 20))
            except MemoryError:
                held.append(None)
        total = sum(len(each) for each in held if each)
        del held
        if total > 1 << 30:
            breach(total)
        """),
    attack("shared-mappings", "anonymous mappings that are shared count, too", timeout_s=15.0, slow=True)("""
        import mmap
        held = []
        for _ in range(3000):
            try:
                one = mmap.mmap(-1, 1 << 20)
                one.write(b"x" * (1 << 20))
                held.append(one)
            except (OSError, MemoryError):
                break
        if len(held) > 1000:
            breach(len(held), "MB")
        del held
        """),
    attack("memfd", "there are no files in memory", holds=FILTERED)("""
        must_fail("memfd_create", lambda: os.memfd_create("x"))
        must_fail("memfd_create", lambda: syscall("memfd_create", b"x", 0))
        must_fail("memfd_secret", lambda: syscall("memfd_secret", 0))
        """),
    attack("shared-memory", "there is no POSIX shared memory", holds=STRONG)("""
        from multiprocessing import shared_memory
        must_fail("shared_memory", lambda: shared_memory.SharedMemory(create=True, size=1 << 20))
        must_fail("shm_open", lambda: os.open("/dev/shm/x", os.O_CREAT | os.O_RDWR))
        must_fail("mqueue", lambda: os.open("/dev/mqueue/x", os.O_CREAT | os.O_RDWR))
        """),
    attack("locked", "no memory is locked in place", holds=FILTERED)("""
        import mmap
        must_fail("mlockall", lambda: syscall("mlockall", 3))
        one = mmap.mmap(-1, 32 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(one))
        must_fail("mlock", lambda: syscall("mlock", address, 32 << 20))
        must_fail("mlock2", lambda: syscall("mlock2", address, 32 << 20, 0))
        must_fail("MAP_LOCKED", lambda: mmap.mmap(-1, 32 << 20, flags=0x2022))
        """),
    attack(
        "page-tables",
        "sparse mappings cost the kernel little",
        ends="ok timeout memory",
        timeout_s=0.6,
        slow=True,
    )("""
        import mmap
        total, step, one = 0, 1 << 40, None
        while step > 1 << 20:
            try:
                one = mmap.mmap(-1, step)
                total += step
                for at in range(0, step, 2 << 20):
                    one[at] = 1
            except (OSError, MemoryError, ValueError):
                step >>= 1
        if total > 1 << 32:
            breach(total)
        """),
    attack("reserved-address-space", "address space that is only reserved counts")("""
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_long
        got = 0
        for flags in (0x22, 0x4022, 0x40022):
            for _ in range(1000):
                if libc.mmap(None, ctypes.c_long(1 << 30), 0, flags, -1, ctypes.c_long(0)) != -1:
                    got += 1
        if got > 1:
            breach(got, "GB")
        """),
    attack(
        "socket-buffers", "what lies in sockets is bounded", ends="ok timeout", timeout_s=0.6, holds=FILTERED
    )("""
        held = []
        for _ in range(500):
            pair = attempt(socket.socketpair)
            if pair is None:
                break
            for end in pair:
                attempt(end.setsockopt, 1, 7, 1 << 30)
                must_fail("SO_SNDBUFFORCE", end.setsockopt, 1, 32, 1 << 30)
                end.setblocking(False)
                while attempt(end.send, bytes(65536)):
                    pass
            held.append(pair)
        if len(held) > 40:
            breach(len(held))
        del held
        """),
    attack("descriptors-in-flight", "descriptors that are sent to nobody are bounded", holds=FILTERED)("""
        import array
        sent = 0
        for _ in range(20):
            pair = attempt(socket.socketpair)
            if pair is None:
                break
            for end in pair:
                end.setblocking(False)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1] * 250))]
            while attempt(pair[0].sendmsg, [b"x"], rights):
                sent += 250
            attempt(os.close, pair[1].detach())
        if sent > 10_000:
            breach(sent, "descriptors in flight")
        """),
    attack("pipes", "what lies in pipes is bounded by their number and size", holds=FILTERED)("""
        import fcntl
        count = 0
        while (pair := attempt(os.pipe)) is not None:
            must_fail("F_SETPIPE_SZ", fcntl.fcntl, pair[1], fcntl.F_SETPIPE_SZ, 1 << 20)
            os.set_blocking(pair[1], False)
            while attempt(os.write, pair[1], bytes(65536)):
                pass
            count += 1
        if count > 40:
            breach(count)
        """),
    attack(
        "deep-recursion",
        "a stack's end is at most a crash",
        ends="killed error memory timeout",
        timeout_s=0.6,
    )("""
        sys.setrecursionlimit(1 << 30)
        nested = []
        for _ in range(3_000_000):
            nested = [nested]
        repr(nested)
        """),
    attack("recursive-code", "source that nests without end is at most a crash", ends="error memory killed")(
        "eval('(' * 100_000 + ')' * 100_000)"
    ),
    attack(
        "decompression-bomb", "what unpacks to gigabytes ends", ends="memory error killed", timeout_s=15.0
    )("""
        import zlib
        bomb = zlib.compress(bytes(8 << 20), 9)
        for _ in range(3):
            bomb = zlib.compress(bomb * 50, 9)
        while True:
            bomb = zlib.decompress(bomb)
            bomb = bomb * 64
        """),
    attack("string-formatting", "one expression that makes gigabytes ends", ends="memory error")(
        "f'{1:>{10**10}}' + 'x' * 10**10"
    ),
    attack(
        "no-memory-left-for-the-answer", "it ends in order", ends="memory error killed ok", timeout_s=15.0
    )("""
        held = []
        for size in (1 << 24, 1 << 20, 1 << 16, 1 << 12, 1 << 8, 16):
            try:
                while True:
                    held.append(bytearray(size))
            except MemoryError:
                pass
        globals()["kept"] = held
        1 / 0
        """),
)
