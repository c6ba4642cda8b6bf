"""More output than anybody wants to have, and output that is none."""

from .model import EVERYWHERE, Attack

OVER = ("output_limit",)

ATTACKS = (
    Attack(
        name="print-gigabytes",
        contained="printing is stopped at the limit",
        code="while True: print('x' * 100_000)",
        ends=OVER,
        survives=None,
        holds=EVERYWHERE,
        slow=True,
    ),
    Attack(
        name="write-to-descriptor",
        contained="writing past Python's streams is counted likewise",
        code="""
        block = b"y" * 65536
        while True:
            os.write(1, block)
            os.write(2, block)
        """,
        ends=OVER,
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="write-and-swallow",
        contained="whoever goes on printing after the limit is killed",
        code="""
        while True:
            try:
                while True:
                    os.write(1, b"z" * 65536)
            except BaseException:
                pass
        """,
        ends=OVER,
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="writing-thread",
        contained="a thread that writes when the cell is over does not harm the next one",
        code=(
            """
            def write():
                while True:
                    os.write(1, b"w" * 65536)
            threading.Thread(target=write, daemon=True).start()
            """,
            "1",
        ),
        ends=("ok", *OVER, "timeout"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="invalid-text",
        contained="bytes that are no text become text",
        code=r"""
        os.write(1, b"\xff\xfe\x00\xed\xa0\x80" * 100)
        os.write(2, b"\xc0\xaf\xf5" * 100)
        print("\ud800\udfff\x00\x1b]0;title\x07\x1b[2J\u202e\r")
        sys.stdout.buffer.write(b"\xf0\x9f")
        """,
        holds=EVERYWHERE,
    ),
    Attack(
        name="surrogates-everywhere",
        contained="lone surrogates come out as something that can be written",
        code=r"""
        display("\ud800")
        class Odd:
            def __repr__(self): return "\ud800" * 10
            def _repr_html_(self): return "\udfff"
            def _repr_mimebundle_(self): return {"text/\ud800": "\ud800"}
        display(Odd())
        raise type("Err\ud800", (Exception,), {})("\ud800")
        """,
        ends=("error",),
        holds=EVERYWHERE,
    ),
    Attack(
        name="huge-result",
        contained="a result is cut",
        code="'r' * 30_000_000",
        ends=("ok", "memory"),
        holds=EVERYWHERE,
    ),
    Attack(
        name="huge-message",
        contained="an exception's message and name are cut",
        code="raise type('E' * 1_000_000, (Exception,), {})('m' * 20_000_000)",
        ends=("error",),
        holds=EVERYWHERE,
    ),
    Attack(
        name="long-traceback",
        contained="a traceback is cut",
        code="""
        sys.setrecursionlimit(100_000)
        def down(n):
            down(n + 1)
        down(0)
        """,
        ends=("error", "killed", "timeout"),
        survives=None,
        holds=EVERYWHERE,
        timeout_s=0.6,
    ),
    Attack(
        name="wide-group",
        contained="a group of many exceptions with many causes is cut",
        code="""
        errors = []
        for number in range(3000):
            try:
                raise ValueError(number) from KeyError(number)
            except ValueError as error:
                errors.append(error)
        raise ExceptionGroup("many", [ExceptionGroup(str(n), errors) for n in range(20)])
        """,
        ends=("error", "memory", "timeout", "killed"),
        survives=None,
        timeout_s=0.6,
        holds=EVERYWHERE,
        slow=True,
    ),
    Attack(
        name="chained-for-ever",
        contained="a chain of exceptions that is endless, or a ring, is cut",
        code="""
        first = last = ValueError("x")
        for number in range(50_000):
            link = ValueError(number)
            last.__context__ = link
            last = link
        raise first
        """,
        ends=("error", "killed", "memory", "timeout"),
        survives=None,
        timeout_s=0.6,
        holds=EVERYWHERE,
        slow=True,
    ),
    Attack(
        name="hostile-exception",
        contained="an exception whose every method fails is described nevertheless",
        code="""
        class Bad(Exception):
            def __str__(self): raise SystemExit(0)
            __repr__ = __str__
            __traceback__ = property(lambda self: 1 / 0)
            __cause__ = property(lambda self: 1 / 0)
            __notes__ = property(lambda self: 1 / 0)
            def __class_getitem__(cls, item): raise KeyError
        raise Bad
        """,
        ends=("error",),
        holds=EVERYWHERE,
    ),
    Attack(
        name="notes",
        contained="notes of an exception are cut",
        code="""
        error = ValueError("x")
        error.__notes__ = ["n" * 100_000] * 100
        raise error
        """,
        ends=("error", "memory"),
        holds=EVERYWHERE,
    ),
    Attack(
        name="huge-bundles",
        contained="displayed bundles are bounded in size and number",
        code="""
        class Huge:
            def _repr_mimebundle_(self):
                return {f"text/{number}": "x" * 100_000 for number in range(50)}
        for _ in range(10_000):
            display(1)
        for _ in range(5):
            display(Huge())
        """,
        holds=EVERYWHERE,
    ),
    Attack(
        name="many-mime-types",
        contained="a bundle with many types, or a name without end, is bounded",
        code="""
        class Many:
            def _repr_mimebundle_(self):
                return {"t" * number: "" for number in range(3000)}
        for _ in range(20):
            display(Many())
        """,
        ends=("ok", "error", "killed", "memory", "timeout"),
        survives=None,
        holds=EVERYWHERE,
        timeout_s=0.6,
    ),
    Attack(
        name="closed-streams",
        contained="a session without streams goes on, or ends",
        code=(
            "for each in (0, 1, 2): os.close(each)",
            "print('x')",
            "sys.stdout = None; sys.stderr = 5; sys.stdin = None",
            "print('y'); input()",
        ),
        ends=("ok", "error", "killed"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="stream-of-its-own",
        contained="a stream that never returns, or raises, is only the code's own",
        code="""
        class Stream:
            closed = property(lambda self: 1 / 0)
            def write(self, text): raise KeyboardInterrupt
            def flush(self):
                while True:
                    pass
        sys.stdout = Stream()
        """,
        ends=("timeout", "error"),
        survives=None,
        timeout_s=0.3,
        holds=EVERYWHERE,
    ),
    Attack(
        name="exit",
        contained="whatever the code exits with is an ordinary end",
        code=("sys.exit('x' * 10_000_000)", "raise SystemExit(object())", "sys.exit(2 ** 70)"),
        ends=("error",),
        holds=EVERYWHERE,
    ),
    Attack(
        name="hard-exit",
        contained="an exit past Python ends the session, and is told",
        code="os._exit(0)",
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
)
