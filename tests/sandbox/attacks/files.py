"""Files of the machine, of the server, of other sessions; and filling the disk."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

import contextlib

from openenv_core.sandbox import FileRefusedError

from .model import FILTERED, STRONG, Stage, attacks_held_at


async def links_through_get(stage: Stage) -> None:
    """The code puts links into the workspace; the server, which may read everything, is asked for them."""
    await stage.run("""
        for number, path in enumerate((HOST["canary"], "/etc/shadow", "/proc/self/environ", "/proc/1/environ")):
            os.symlink(path, f"link{number}")
            attempt(os.link, path, f"hard{number}")
        os.symlink("/", "root")
        os.symlink(HOST["folder"], "folder")
        os.symlink("..", "up")
        os.mkfifo("pipe") if attempt(os.mkfifo, "pipe") else None
        os.symlink("loop", "loop")
    """)
    name = stage.host["canary"].rpartition("/")[2]
    paths = [f"{kind}{number}" for kind in ("link", "hard") for number in range(4)]
    paths += ["root/etc/passwd", "root/etc/shadow", f"folder/{name}", "up/.lock", "up/1/x", "loop", "pipe"]
    paths += ["../" * 8 + "etc/passwd", "/etc/passwd", "x/../../../etc/passwd", "a\0b", "./..", ".", ""]
    for path in paths:
        with contextlib.suppress(FileRefusedError):
            data = await stage.session.get_file(path)
            stage.breaches.append(f"get_file({path!r}) returned {data[:80]!r}")
    listed = [info.path for info in await stage.session.list_files()]
    if listed:
        stage.breaches.append(f"links are listed as files: {listed}")


async def links_through_put(stage: Stage) -> None:
    """The code puts links into the workspace; the server, which may write everything, is told to write there."""
    await stage.run("""
        os.symlink(HOST["writable"], "file")
        os.symlink(HOST["folder"], "folder")
        os.symlink(HOST["folder"] + "/planted", "dangling")
        attempt(os.link, HOST["writable"], "hard")
        attempt(os.mkfifo, "pipe")
    """)
    paths = ["file", "folder/planted", "folder/new/planted", "dangling", "../planted", "/tmp/planted"]
    for path in (*paths, "x/../../planted"):
        try:
            info = await stage.session.put_file(path, b"planted")
        except FileRefusedError:
            continue
        if await stage.session.get_file(info.path) != b"planted":
            stage.breaches.append(f"put_file({path!r}) wrote somewhere else")


async def swapped_while_read(stage: Stage) -> None:
    """A folder and a link to a folder of the machine change places while the server looks in there."""
    await stage.run("""
        os.mkdir("a"), open("a/secret", "w").write("mine"), os.symlink(HOST["folder"], "b")

        def swap():
            while True:
                for one, other in (("a", "t"), ("b", "a"), ("t", "b")):
                    attempt(os.rename, one, other)

        threading.Thread(target=swap, daemon=True).start()
    """)
    import asyncio

    running = asyncio.create_task(stage.session.execute("time.sleep(0.2)", timeout_s=20.0))
    for _ in range(20):
        with contextlib.suppress(FileRefusedError):
            data = await stage.session.get_file("a/secret")
            if data != b"mine":
                stage.breaches.append(f"get_file followed a link: {data[:80]!r}")
        await asyncio.sleep(0)
    stage.executions.append(await running)


attack = attacks_held_at(STRONG)

ATTACKS = (
    attack("read-secrets", "no file beside Python's and the workspace's can be opened")("""
        for path in HOST["secret_files"]:
            must_fail(path, lambda: open(path, "rb").read(100))
            must_fail(path, lambda: os.open(path, os.O_RDWR))
        """),
    attack(
        "world-readable-canary", "a file that everybody may read is not readable by any call that opens"
    )("""
        path, folder = HOST["canary"], HOST["folder"]
        must_fail("open", lambda: open(path).read())
        must_fail("open of the folder", lambda: os.listdir(folder))
        must_fail("a mapping", lambda: __import__("mmap").mmap(os.open(path, os.O_RDONLY), 0))
        must_fail("O_PATH, then by /proc", lambda: open(f"/proc/self/fd/{os.open(path, os.O_PATH)}").read())
        must_fail("O_PATH of the folder", lambda: os.open("secret", os.O_RDONLY, dir_fd=os.open(folder, os.O_PATH)))
        must_fail("openat2", lambda: syscall("openat2", -100, path.encode(), bytes(24), 24))
        must_fail("chdir, then open", lambda: (os.chdir(folder), open(os.path.basename(path)).read()))
        must_fail("sendfile", lambda: os.sendfile(1, os.open(path, os.O_RDONLY), 0, 100))
        must_fail("name_to_handle_at", lambda: syscall("name_to_handle_at", -100, path.encode(), bytes(200), bytes(8), 0))
        """),
    attack("proc-of-others", "no other process shows its environment, memory, root or descriptors")("""
        for proc in (f"{folder}/{pid}" for folder in ("/proc", "/.proc") for pid in (1, os.getppid(), *HOST["pids"])):
            for name in ("environ", "mem", "maps", "cmdline", "root/etc/passwd", "cwd/x", "fd/0", "auxv", "status"):
                path = f"{proc}/{name}"
                must_fail(path, lambda: open(path, "rb").read(4096))
            for name in ("root", "cwd", "fd", "task", "ns", "map_files"):
                must_fail(f"{proc}/{name}", lambda: os.listdir(f"{proc}/{name}"))
            for name in ("exe", "cwd", "root", "fd/0", "fd/1", "ns/net"):
                must_fail(f"{proc}/{name}", lambda: os.readlink(f"{proc}/{name}"))
        """),
    attack("proc-of-the-machine", "the kernel's own files are neither readable nor writable")("""
        for name in ("kcore", "kmsg", "sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/hostname", "keys",
                     "kallsyms", "mounts", "net/tcp", "sysvipc/shm", "self/mem", "self/environ", "self/maps"):
            # Containers put /dev/null in the place of some of them.
            if attempt(lambda: open(f"/proc/{name}", "rb").read(100)):
                breach("read", name)
            file = attempt(os.open, f"/proc/{name}", os.O_WRONLY)
            if file is not None and not os.path.samestat(os.fstat(file), os.stat("/dev/null")):
                breach("opened", name)
        for name in ("/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs", "/sys/kernel/debug", "/dev/kmsg"):
            must_fail(name, lambda: open(name, "rb").read(100))
        """),
    attack("symlinks", "a link that leads out of the workspace opens nothing")("""
        for number, target in enumerate((HOST["canary"], "/etc/passwd", "/proc/self/root/etc/passwd", "../../../etc/passwd")):
            os.symlink(target, f"l{number}")
            must_fail(target, lambda: open(f"l{number}").read())
        os.symlink(HOST["folder"], "folder")
        must_fail("a file through a linked folder", lambda: open("folder/secret").read())
        must_fail("writing through a linked folder", lambda: open("folder/open/planted", "w").write("x"))
        """),
    attack("hardlinks", "no file outside gets a name in the workspace, and none of ours one outside")("""
        must_fail("link in", lambda: os.link(HOST["writable"], "mine"))
        must_fail("rename in", lambda: os.rename(HOST["writable"], "mine"))
        open("x", "w").write("x")
        must_fail("link out", lambda: os.link("x", HOST["folder"] + "/open/planted"))
        must_fail("rename out", lambda: os.rename("x", HOST["folder"] + "/open/planted"))
        fd = os.open("x", os.O_RDONLY)
        must_fail("link out by descriptor", lambda: syscall("linkat", fd, b"", -100, (HOST["folder"] + "/open/p").encode(), 0x1000))
        """),
    attack("write-outside", "what everybody may write is not writable")("""
        target, place = HOST["writable"], HOST["folder"] + "/open"
        must_fail("append", lambda: open(target, "a").write("x"))
        must_fail("truncate by name", lambda: os.truncate(target, 0))
        must_fail("O_TRUNC", lambda: os.open(target, os.O_RDONLY | os.O_TRUNC))
        must_fail("unlink", lambda: os.unlink(target))
        must_fail("create", lambda: open(place + "/planted", "w"))
        must_fail("mkdir", lambda: os.mkdir(place + "/planted"))
        must_fail("symlink", lambda: os.symlink("/", place + "/planted"))
        must_fail("rename", lambda: os.rename(target, place + "/planted"))
        must_fail("exchange", lambda: syscall("renameat2", -100, target.encode(), -100, HOST["canary"].encode(), 2))
        must_fail("O_TMPFILE", lambda: os.open(place, os.O_TMPFILE | os.O_RDWR))
        must_fail("rmdir", lambda: os.rmdir(place))
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/etc", "/", "/usr/lib", "/root", "/home", sys.prefix):
            if not os.path.realpath(folder).startswith(os.getcwd()):
                must_fail(folder, lambda: open(folder + "/planted", "w"))
        """),
    attack("attributes-outside", "mode, owner, times and attributes of files outside stay as they are")("""
        for path in (HOST["writable"], HOST["canary"], HOST["folder"] + "/open", sys.executable):
            for name, call in {
                "chmod": lambda: os.chmod(path, 0o777), "chown": lambda: os.chown(path, os.getuid(), -1),
                "utime": lambda: os.utime(path, (1, 1)), "setxattr": lambda: os.setxattr(path, "user.x", b"x"),
                "removexattr": lambda: os.removexattr(path, "user.x"), "lchown": lambda: os.lchown(path, 0, 0),
                "fchmodat2": lambda: syscall(452, -100, path.encode(), 0o777, 0),
                "ioctl": lambda: __import__("fcntl").ioctl(os.open(path, os.O_RDONLY), 0x40086602, bytes(8)),
                "fchmod": lambda: os.fchmod(os.open(path, os.O_RDONLY), 0o777),
                "utime by descriptor": lambda: os.utime(os.open(path, os.O_RDONLY), (1, 1)),
                "file_setattr": lambda: syscall(469, -100, path.encode(), bytes(32), 32, 0),
            }.items():
                try:
                    call()
                except Exception:
                    continue
                # A read-only descriptor of a library may be had; its owner is another.
                breach(name, path)
        """),
    attack("locks", "on files that all may read no lock is seen or held", holds=FILTERED)("""
        import fcntl
        file = os.open(json.__file__, os.O_RDONLY)
        must_fail("flock", fcntl.flock, file, fcntl.LOCK_SH)
        must_fail("F_GETLK", fcntl.fcntl, file, fcntl.F_GETLK, bytes(32))
        must_fail("F_OFD_SETLK", fcntl.fcntl, file, 37, bytes(32))
        """),
    attack("special-files", "no device, pipe or socket is made, and none but harmless ones opened")("""
        import stat
        for kind in (stat.S_IFCHR, stat.S_IFBLK):
            for major, minor in ((1, 1), (1, 2), (8, 0), (254, 0), (10, 200), (5, 0)):
                must_fail("mknod", lambda: os.mknod(f"d{kind}{major}", 0o666 | kind, os.makedev(major, minor)))
        must_fail("mkfifo", lambda: os.mkfifo("pipe"))
        must_fail("mknod of a socket", lambda: os.mknod("sock", 0o666 | stat.S_IFSOCK))
        for name in ("mem", "kmem", "port", "kvm", "fuse", "net/tun", "vda", "sda", "ptmx", "tty", "console",
                     "vsock", "vhost-vsock", "userfaultfd", "shm/x", "mqueue/x", "loop-control", "pts/0", "hpet"):
            must_fail(name, lambda: os.open("/dev/" + name, os.O_RDWR | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK))
        """),
    attack("server-source", "this project's packages, hidden tests too, are neither imported nor read")("""
        for name in ("openenv_core", "servers", "envs", "rl_bridge", "code_interpreter_env", "tests", "benchmarks"):
            try:
                found = __import__(name)
            except Exception:
                continue
            # Somebody else's distribution may have packages of such names too, torchmonarch's has one of tests.
            if name != "tests" or any(place in HOST["ours"] for place in found.__path__):
                breach("imported", name, found.__path__)
        for path in HOST["ours"]:
            must_fail(path, lambda: open(path).read(10))
            must_fail(path, lambda: os.listdir(path))
        mine = [name for name in sys.modules if name.startswith("openenv_core")]
        if mine:
            breach("modules", mine)
        """),
    attack("deep-tree", "folders without end take bounded time", ends="ok killed", slow=True, alone=True)("""
        attempt(os.chmod, ".", 0o700)
        for number in range(HOST["deep"]):
            try:
                os.mkdir("d" * 200)
                os.chdir("d" * 200)
            except OSError:
                break
        """),
    attack(
        "many-inodes", "more files than allowed are refused or end it", ends="ok killed timeout", alone=True
    )("""
        made = 0
        for number in range(200_000):
            try:
                os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY))
                made += 1
            except OSError:
                break
        """),
    attack(
        "fill-disk",
        "more bytes than allowed are refused or end it",
        ends="ok killed timeout error",
        alone=True,
    )("""
        block = bytes(1 << 20)
        for number in range(2000):
            with attempt(open, f"f{number}", "wb") or open(os.devnull, "wb") as file:
                for _ in range(8):
                    attempt(os.write, file.fileno(), block)
        """),
    attack("reserve-disk", "reserved bytes count like written ones", ends="ok killed timeout", alone=True)("""
        for number in range(400):
            file = attempt(os.open, f"f{number}", os.O_CREAT | os.O_WRONLY)
            if file is not None:
                attempt(os.posix_fallocate, file, 0, 8 << 20)
                os.close(file)
        """),
    attack(
        "nameless-files", "files without a name count", ends="ok killed timeout", slow=True, alone=True
    )("""
        held, block = [], bytes(1 << 20)
        for number in range(40):
            file = attempt(os.open, "f", os.O_CREAT | os.O_EXCL | os.O_RDWR)
            if file is None:
                break
            os.unlink("f")
            held.append(file)
            for _ in range(8):
                attempt(os.write, file, block)
        time.sleep(0.5)
        """),
    attack("sparse-file", "no file grows beyond the limit of one", holds=FILTERED)("""
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("big", "wb") as file:
            must_fail("truncate to a terabyte", lambda: os.truncate(file.fileno(), 1 << 40))
            must_fail("write behind", lambda: os.pwrite(file.fileno(), b"x", 1 << 40))
        """),
    attack(
        "file-size-signal",
        "the signal of a file too large ends at most it",
        ends="killed error",
        holds=FILTERED,
    )("""
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with open("big", "wb") as file:
            os.pwrite(file.fileno(), b"x", 1 << 40)
        """),
    attack("links-through-get-file", "the server follows no link of the code's when it reads")(
        links_through_get
    ),
    attack("links-through-put-file", "the server follows no link of the code's when it writes")(
        links_through_put
    ),
    attack("swapped-folders", "a folder that becomes a link meanwhile is not followed", survives=None)(
        swapped_while_read
    ),
    attack("workspace-taken-away", "a workspace that code has made unusable is its own misfortune")("""
        attempt(os.rmdir, ".tmp")
        attempt(os.symlink, "/", ".tmp")
        here = os.getcwd()
        attempt(os.chmod, ".", 0)
        attempt(os.rename, here, here + "2")
        attempt(os.rmdir, here)
        must_fail("leaving", lambda: os.rename(here, HOST["folder"] + "/open/w"))
        attempt(os.chmod, ".", 0o700)
        """),
    attack("names", "names that are no text, too long, or full of escapes are nobody's problem")(r"""
        for name in (b"\xff\xfe", b"new\nline", b"\x1b[2Jclear", b"-rf", b"x" * 255, "\u202egnp.exe".encode(), b"a b", b"'\"`$(x)"):
            with open(name, "w") as file:
                file.write("x")
        """),
)
