"""Time: loops that no interrupt ends, and threads that run on."""

from .model import EVERYWHERE, FILTERED, Stage, attacks_held_at


async def spinning_thread(stage: Stage) -> None:
    """A thread runs on when its cell is over: between two cells it must get no time."""
    await stage.run("""
        turns = 0

        def spin():
            global turns
            while True:
                turns += 1

        threading.Thread(target=spin, daemon=True).start()
        sys.setswitchinterval(1e-5)
    """)
    import asyncio

    before = await stage.session.execute("used = time.process_time(); used", timeout_s=20.0)
    await asyncio.sleep(0.5)
    after = await stage.session.execute("time.process_time() - used", timeout_s=20.0)
    stage.executions += [before, after]
    if after.status == "ok" and float(after.result or 0) > 0.3:
        stage.breaches.append(f"a thread had {after.result} s of processor time between two cells")


async def cancelled(stage: Stage) -> None:
    """Whoever waits for a cell goes away in the middle of it."""
    import asyncio

    running = asyncio.create_task(stage.run("while True: pass", timeout_s=5.0))
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


attack = attacks_held_at(EVERYWHERE, ends="timeout", timeout_s=0.2)

ATTACKS = (
    attack("loop", "an endless loop is ended")("while True: pass"),
    attack("sleep", "sleeping is ended")("time.sleep(60)"),
    attack("regular-expression", "catastrophic backtracking is ended")(
        "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')"
    ),
    attack("power", "one operation that holds the lock all the time is ended", ends="timeout memory")(
        "(10 ** 10 ** 7) ** 50"
    ),
    attack("swallowed-interrupt", "whoever catches interrupts is killed")("""
        while True:
            try:
                while True:
                    pass
            except BaseException:
                continue
        """),
    attack("finally", "clean-up without end is killed")("""
        try:
            time.sleep(30)
        finally:
            time.sleep(30)
        """),
    attack("constructor-of-doom", "what runs after the cell, in the result's repr, is ended as well")("""
        class Late:
            def __repr__(self):
                while True:
                    try:
                        time.sleep(1)
                    except BaseException:
                        pass
        Late()
        """),
    attack(
        "compilation", "source that takes for ever to compile is ended", ends="timeout error memory killed"
    )("compile('a = ' + '+'.join(f'(lambda x{i}: x{i})' for i in range(200_000)), 'x', 'exec')"),
    attack("sleeping-threads", "threads that never end do not keep the cell", ends="ok", timeout_s=10.0)("""
        for _ in range(5):
            threading.Thread(target=time.sleep, args=(60,)).start()
        """),
    attack("native-loop", "a loop that no interrupt ends is killed", machine="x86_64")("""
        import mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex("ebfe"))
        ctypes.PYFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        """),
    attack("system-calls", "a storm of system calls is ended", ends="timeout error")("""
        while True:
            os.stat("/"), os.getpid(), os.listdir(".")
        """),
    attack(
        "linear-algebra", "numpy's loops are ended, too", ends="timeout memory error killed", timeout_s=0.5
    )("""
        try:
            import numpy
        except ImportError:
            while True:
                pass
        while True:
            a = numpy.ones((300, 300))
            a @ a
        """),
    attack(
        "spinning-thread",
        "between two cells nothing of the session runs",
        survives=None,
        ends="ok",
        timeout_s=10.0,
    )(spinning_thread),
    attack("abandoned", "a cell that nobody waits for any more is ended", timeout_s=10.0)(cancelled),
    attack("blocked-read", "waiting for what never comes is ended", holds=FILTERED)("""
        one, other = socket.socketpair()
        one.recv(1)
        """),
)
