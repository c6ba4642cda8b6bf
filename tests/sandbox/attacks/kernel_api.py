"""Ways out of the walls themselves, by calls of the kernel."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from .model import FILTERED, STRONG, attacks_held_at

attack = attacks_held_at(FILTERED)

ATTACKS = (
    attack("mount", "nothing is mounted, by the old calls or the new")("""
        for source, kind, flags in (("tmpfs", "tmpfs", 0), ("proc", "proc", 0), ("/", None, 0x1000), ("none", None, 0x20), ("sysfs", "sysfs", 0)):
            must_fail("mount", lambda: syscall("mount", source.encode(), os.getcwd().encode(), kind and kind.encode(), flags, None))
        must_fail("umount", lambda: syscall("umount2", b"/", 2))
        for name, arguments in {
            "fsopen": (b"tmpfs", 0), "fsconfig": (3, 6, None, None, 0), "fsmount": (3, 0, 0), "fspick": (-100, b"/", 0),
            "open_tree": (-100, b"/", 1), "move_mount": (-100, b"/", -100, b"/", 0),
            "mount_setattr": (-100, b"/", 0, bytes(32), 32), "pivot_root": (b".", b"."), "statmount": (bytes(64), bytes(64), 64, 0),
            "listmount": (bytes(64), bytes(64), 8, 0), "swapon": (b"x", 0), "swapoff": (b"x",), "quotactl_fd": (3, 0, 0, None),
        }.items():
            if name in CALLS:
                must_fail(name, lambda: syscall(name, *arguments))
        """),
    attack("namespaces", "no name space is made or entered")("""
        for bit in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x400, 0x200):
            must_fail(f"unshare {bit:#x}", lambda: syscall("unshare", bit))
            must_fail(f"setns {bit:#x}", lambda: syscall("setns", 3, bit))
        must_fail("a user name space with others", lambda: syscall("unshare", 0x7E020000))
        """),
    attack("roots", "the root stays where it is", holds=STRONG)("""
        os.mkdir("jail")
        must_fail("chroot", os.chroot, "jail")
        must_fail("chroot up", os.chroot, "..")
        for _ in range(100):
            attempt(os.chdir, "..")
        must_fail("reading from the top", lambda: open("etc/shadow").read())
        """),
    attack("top-folder", "the top folder is not listed", holds=STRONG)("""
        must_fail("listing", os.listdir, "/")
        """),
    attack("identities", "nobody becomes anybody else", holds=STRONG)("""
        for name, arguments in {
            "setuid": (0,), "setgid": (0,), "setreuid": (0, 0), "setregid": (0, 0), "setresuid": (0, 0, 0), "setresgid": (0, 0, 0),
            "setgroups": (1, bytes(4)), "setfsuid": (0,), "setfsgid": (0,), "capset": (bytes(8), bytes(24)),
        }.items():
            must_fail(name, lambda: syscall(name, *arguments))
        if os.geteuid() == 0:
            breach("root")
        if attempt(lambda: [line for line in open("/proc/self/status") if line.startswith("Cap")]):
            breach("status")
        header, data = bytes.fromhex("22050820") + bytes(4), ctypes.create_string_buffer(24)
        syscall("capget", header, data)
        if any(data.raw):
            breach("capabilities", data.raw.hex())
        """),
    attack("machine-settings", "the machine's name, time, modules and power stay")("""
        for name, arguments in {
            "sethostname": (b"x", 1), "setdomainname": (b"x", 1), "settimeofday": (bytes(16), None), "clock_settime": (0, bytes(16)),
            "adjtimex": (bytes(208),), "clock_adjtime": (0, bytes(208)), "reboot": (0, 0, 0, None), "init_module": (b"", 0, b""),
            "finit_module": (3, b"", 0), "delete_module": (b"x", 0), "kexec_load": (0, 0, None, 0), "kexec_file_load": (3, 3, 0, b"", 0),
            "iopl": (3,), "ioperm": (0, 1, 1), "vhangup": (), "sync": (), "syncfs": (3,),
            "lsm_set_self_attr": (100, bytes(32), 32, 0),
        }.items():
            if name in CALLS:
                must_fail(name, lambda: syscall(name, *arguments))
        """),
    attack("processor-modes", "no odd mode of the processor or the loader is switched on")("""
        for name, arguments in {
            "modify_ldt": (1, bytes(16), 16), "personality": (0x0400000,), "uselib": (b"x",), "set_thread_area": (bytes(16),),
            "map_shadow_stack": (0, 4096, 0), "pkey_alloc": (0, 0), "remap_file_pages": (0, 0, 0, 0, 0), "mbind": (0, 4096, 0, None, 0, 0),
            "set_mempolicy": (0, None, 0), "io_setup": (1, bytes(8)), "vmsplice": (1, bytes(16), 1, 0), "tee": (1, 1, 1, 0),
            "splice": (1, None, 1, None, 1, 0), "mseal": (0, 0, 0), "signalfd4": (-1, bytes(8), 8, 0), "timerfd_create": (0, 0),
        }.items():
            if name in CALLS:
                must_fail(name, lambda: syscall(name, *arguments))
        """),
    attack(
        "other-conventions", "calls of other word sizes end the process", ends="killed", machine="x86_64"
    )("""
        import mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex("b814000000cd80c3"))
        number = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        if number == os.getpid():
            breach("a call by int 0x80")
        """),
    attack("x32", "calls with the numbers of x32 end the process", ends="killed", machine="x86_64")(
        "syscall(0x40000000 | 39)\nbreach('x32')"
    ),
    attack("upper-halves", "arguments are judged as the kernel sees them", ends="ok killed")("""
        high = 1 << 32
        must_fail("fork by clone", lambda: syscall("clone", high | 17, 0, 0, 0, 0) or os._exit(0))
        must_fail("a thread's flags with more", lambda: syscall("clone", high | 0x3D0F00 | 0x10000000, 0, 0, 0, 0))
        must_fail("socketpair", lambda: syscall("socketpair", high | 2, 1, 0, bytes(8)))
        must_fail("prctl", lambda: syscall("prctl", high | 4, 1, 0, 0, 0))
        must_fail("kill", lambda: syscall("kill", high | HOST["victim"], 9))
        must_fail("ioctl", lambda: syscall("ioctl", 1, high | 0x5412, b"x"))
        must_fail("fcntl", lambda: syscall("fcntl", 1, high | 8, HOST["victim"]))
        """),
    attack("handles", "files are not opened by their handles")("""
        import struct
        for kind in (1, 2, 0x81, 0xFE):
            handle = struct.pack("=Ii", 8, kind) + struct.pack("=II", 2, 0) + bytes(120)
            for descriptor in (-100, os.open(".", os.O_RDONLY)):
                must_fail("open_by_handle_at", lambda: syscall("open_by_handle_at", descriptor, handle, 0))
        """),
    attack("walls-again", "new walls take none of the old away")("""
        must_fail("seccomp", lambda: syscall("seccomp", 1, 0, bytes(16)))
        must_fail("strict seccomp", lambda: syscall("prctl", 22, 1, 0, 0, 0))
        must_fail("a listener", lambda: syscall("seccomp", 1, 8, bytes(16)))
        must_fail("landlock", lambda: syscall("landlock_create_ruleset", bytes(24), 24, 0))
        must_fail("restrict", lambda: syscall("landlock_restrict_self", 3, 0))
        must_fail("new privileges", lambda: syscall("prctl", 38, 0, 0, 0, 0))
        """),
    attack("terminals", "nothing is typed into anybody's terminal")("""
        import fcntl
        for descriptor in (0, 1, 2, 3):
            for request in (0x5412, 0x540E, 0x5423, 0x541C, 0x5404, 0x5407):
                must_fail(hex(request), fcntl.ioctl, descriptor, request, b"x")
        must_fail("openpty", lambda: os.openpty())
        """),
    attack("own-code", "machine code of its own has the same calls as Python", machine="x86_64")("""
        import mmap
        page = mmap.mmap(-1, 4096, prot=7)
        # mov eax, 41; mov edi, 2; mov esi, 1; xor edx, edx; syscall; ret
        page.write(bytes.fromhex("b829000000bf02000000be0100000031d20f05c3"))
        result = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        if result >= 0:
            breach("socket", result)
        """),
    attack("newest-calls", "calls that are younger than this project are not there")("""
        for number in (*range(424, 1024), 10_000, 1 << 20, 1 << 29):
            for arguments in ((), (-1, -1, -1, -1, -1, -1), (-100, b".", 0, 0, 0, 0)):
                if number not in CALLS.values():
                    must_fail(str(number), syscall, number, *arguments)
        """),
)
