"""Ways out to other machines, to servers on this one, and to the kernel's own sockets."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from .model import FILTERED, attacks_held_at

attack = attacks_held_at(FILTERED)

ATTACKS = (
    attack("tcp", "no TCP socket is made, so none connects")("""
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            def connect():
                with socket.socket(family, socket.SOCK_STREAM) as one:
                    one.settimeout(0.5)
                    one.connect((address, HOST["tcp"]))
                    one.send(b"hello")
            must_fail("connect", connect)
        must_fail("create_connection", lambda: socket.create_connection(("127.0.0.1", HOST["tcp"]), 0.5))
        """),
    attack("http-libraries", "what stands on sockets fails like sockets")("""
        import http.client, urllib.request
        must_fail("urllib", lambda: urllib.request.urlopen(f"http://127.0.0.1:{HOST['tcp']}/", timeout=0.5))
        must_fail("http.client", lambda: http.client.HTTPConnection("127.0.0.1", HOST["tcp"], timeout=0.5).request("GET", "/"))
        """),
    attack("udp", "no datagram leaves")("""
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            must_fail("sendto", lambda: socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", (address, HOST["udp"])))
        must_fail("udplite", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136))
        """),
    attack("every-family", "no family, type or protocol of sockets can be had but connected pairs")("""
        for family in range(0, 50):
            for kind in (1, 2, 3, 4, 5, 6, 10):
                for flags in (0, 0x80800):
                    try:
                        socket.socket(family, kind | flags).close()
                    except OSError:
                        continue
                    breach("socket", family, kind, flags)
        """),
    attack("raw-and-packet", "nothing is sent or heard below the transport")("""
        for protocol in (0, 1, 6, 17, 255):
            must_fail("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol))
            must_fail("raw6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, protocol))
        must_fail("packet", lambda: socket.socket(17, socket.SOCK_RAW, 0x0300))
        must_fail("ping", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1))
        """),
    attack("netlink", "the kernel is not asked by netlink")("""
        for protocol in range(23):
            must_fail("netlink", lambda: socket.socket(16, socket.SOCK_RAW, protocol))
        must_fail("if_nameindex", socket.if_nameindex) if HOST["isolation"] == "lsm" else None
        """),
    attack("vsock", "the hypervisor and its other guests are not reached")("""
        for address in (0, 1, 2, 3):
            def connect():
                with socket.socket(40, socket.SOCK_STREAM) as one:
                    one.settimeout(0.3)
                    one.connect((address, 1024))
            must_fail("vsock", connect)
        """),
    attack("unix-path", "no socket with a path is reached, by stream or datagram")("""
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            for path in (HOST["unix"], HOST["unix_datagram"], "/run/docker.sock", "/var/run/docker.sock", "/dev/log"):
                must_fail(path, lambda: socket.socket(socket.AF_UNIX, kind).connect(path))
                must_fail(path, lambda: socket.socket(socket.AF_UNIX, kind).sendto(b"x", path))
        """),
    attack("unix-abstract", "no abstract name is reached")("""
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            must_fail("connect", lambda: socket.socket(socket.AF_UNIX, kind).connect("\\0" + HOST["abstract"]))
        """),
    attack("socketpair-turned", "a connected pair cannot be connected, bound or sent to anywhere else")("""
        for kind in (1, 2, 5):
            for flags in (0, 0x800, 0x80000):
                pair = attempt(socket.socketpair, socket.AF_UNIX, kind | flags)
                if pair is None:
                    continue
                for end in pair:
                    for name in (HOST["unix"], HOST["unix_datagram"], "\\0" + HOST["abstract"]):
                        must_fail("connect", end.connect, name)
                        if kind == 5:  # it goes to the other end of the pair, whatever the name; outside it is looked for
                            attempt(end.sendto, b"x", name)
                            continue
                        must_fail("sendto", end.sendto, b"x", name)
                        must_fail("sendmsg", lambda: end.sendmsg([b"x"], [], 0, name))
                    must_fail("bind", end.bind, "here")
                    must_fail("autobind", end.bind, "")
                    must_fail("listen", end.listen)
                    must_fail("accept", lambda: syscall("accept4", end.fileno(), None, None, 0))
        must_fail("a pair of datagrams", lambda: socket.socketpair(socket.AF_UNIX, 2))
        for family in (2, 10, 16, 17, 40):
            must_fail("pair", lambda: socket.socketpair(family, 1))
        """),
    attack("control-socket-turned", "the interpreter's channel leads to the supervisor and nowhere else")("""
        channel = socket.socket(fileno=os.dup(3))
        for name in (HOST["unix"], "\\0" + HOST["abstract"]):
            must_fail("connect", channel.connect, name)
            must_fail("bind", channel.bind, name + "x")
        must_fail("disconnect", lambda: syscall("connect", 3, bytes(16), 16))
        must_fail("credentials of the peer", lambda: channel.setsockopt(1, 16, 1))
        """),
    attack("name-resolution", "no name is asked for", timeout_s=20.0)("""
        for name in ("example.com", HOST["hostname"] + ".invalid", "localhost.localdomain"):
            must_fail(name, lambda: socket.getaddrinfo(name, 80))
        must_fail("gethostbyaddr", lambda: socket.gethostbyaddr("127.0.0.9"))
        """),
    attack("listen", "the session is nobody's server")("""
        def serve(family, address):
            with socket.socket(family, socket.SOCK_STREAM) as one:
                one.bind(address)
                one.listen()
        for family, address in ((2, ("0.0.0.0", 0)), (10, ("::", 0)), (1, "here"), (1, "\\0ropewalk-x"), (40, (0xFFFFFFFF, 9999))):
            must_fail("bind", serve, family, address)
        """),
    attack("io-uring", "no calls are made past the filter")("""
        must_fail("setup", lambda: syscall("io_uring_setup", 8, bytes(120)))
        must_fail("enter", lambda: syscall("io_uring_enter", 3, 1, 1, 1, None, 0))
        must_fail("register", lambda: syscall("io_uring_register", 3, 0, None, 0))
        must_fail("register of no ring", lambda: syscall("io_uring_register", -1, 31, bytes(64), 1))
        """),
    attack("asyncio-network", "an event loop works, and reaches nobody")("""
        import asyncio
        for attempt_ in (
            lambda: asyncio.open_connection("127.0.0.1", HOST["tcp"]),
            lambda: asyncio.open_unix_connection(HOST["unix"]),
        ):
            try:
                await asyncio.wait_for(attempt_(), 0.5)
            except Exception:
                continue
            breach("reached")
        """),
)
