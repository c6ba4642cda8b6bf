"""Time: loops that no interrupt ends, and threads that run on."""

from .model import EVERYWHERE, FILTERED, Attack, Stage


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


ATTACKS = (
    Attack(
        name="loop",
        contained="an endless loop is ended",
        code="while True: pass",
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="sleep",
        contained="sleeping is ended",
        code="time.sleep(60)",
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="regular-expression",
        contained="catastrophic backtracking is ended",
        code="import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="power",
        contained="one operation on large numbers, which holds the lock all the time, is ended",
        code="(10 ** 10 ** 7) ** 50",
        timeout_s=0.2,
        ends=("timeout", "memory"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="swallowed-interrupt",
        contained="whoever catches interrupts is killed",
        code="""
        while True:
            try:
                while True:
                    pass
            except BaseException:
                continue
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="finally",
        contained="clean-up without end is killed",
        code="""
        try:
            time.sleep(30)
        finally:
            time.sleep(30)
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="constructor-of-doom",
        contained="what runs after the cell, in destructors and the result's repr, is ended as well",
        code="""
        class Late:
            def __repr__(self):
                while True:
                    try:
                        time.sleep(1)
                    except BaseException:
                        pass
        Late()
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="compilation",
        contained="source that takes for ever to compile is ended",
        code="compile('a = ' + '+'.join(f'(lambda x{i}: x{i})' for i in range(200_000)), 'x', 'exec')",
        timeout_s=0.2,
        ends=("timeout", "error", "memory", "killed"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="sleeping-threads",
        contained="threads that never end do not keep the cell",
        code="""
        for _ in range(5):
            threading.Thread(target=time.sleep, args=(60,)).start()
        """,
        holds=EVERYWHERE,
    ),
    Attack(
        name="native-loop",
        contained="a loop of machine code that no interrupt ends is killed",
        code="""
        import mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex("ebfe"))
        ctypes.PYFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        machine="x86_64",
        holds=EVERYWHERE,
    ),
    Attack(
        name="system-calls",
        contained="a storm of system calls is ended",
        code="""
        while True:
            os.stat("/"), os.getpid(), os.listdir(".")
        """,
        timeout_s=0.2,
        ends=("timeout", "error"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="linear-algebra",
        contained="numpy's loops are ended, too",
        code="""
        try:
            import numpy
        except ImportError:
            while True:
                pass
        while True:
            a = numpy.ones((300, 300))
            a @ a
        """,
        timeout_s=0.5,
        ends=("timeout", "memory", "error", "killed"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="spinning-thread",
        contained="between two cells nothing of the session runs",
        act=spinning_thread,
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="abandoned",
        contained="a cell that nobody waits for any more is ended",
        act=cancelled,
        ends=("timeout",),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="blocked-read",
        contained="waiting for what never comes is ended",
        code="""
        one, other = socket.socketpair()
        one.recv(1)
        """,
        timeout_s=0.2,
        ends=("timeout",),
        survives=None,
        holds=FILTERED,
    ),
)
