"""More output than anybody wants to have, and output that is none."""

from .model import EVERYWHERE, attacks_held_at

attack = attacks_held_at(EVERYWHERE)

ATTACKS = (
    attack("print-gigabytes", "printing is stopped at the limit", ends="output_limit", slow=True)(
        "while True: print('x' * 100_000)"
    ),
    attack("write-to-descriptor", "writing past Python's streams is counted", ends="output_limit")("""
        block = b"y" * 65536
        while True:
            os.write(1, block)
            os.write(2, block)
        """),
    attack("write-and-swallow", "whoever goes on printing is killed", ends="output_limit", survives=False)("""
        while True:
            try:
                while True:
                    os.write(1, b"z" * 65536)
            except BaseException:
                pass
        """),
    attack(
        "writing-thread",
        "a thread that writes afterwards does not harm the next cell",
        ends="ok output_limit timeout",
    )(
        """
            def write():
                while True:
                    os.write(1, b"w" * 65536)
            threading.Thread(target=write, daemon=True).start()
            """,
        "1",
    ),
    attack("invalid-text", "bytes that are no text become text")(r"""
        os.write(1, b"\xff\xfe\x00\xed\xa0\x80" * 100)
        os.write(2, b"\xc0\xaf\xf5" * 100)
        print("\ud800\udfff\x00\x1b]0;title\x07\x1b[2J\u202e\r")
        sys.stdout.buffer.write(b"\xf0\x9f")
        """),
    attack("surrogates-everywhere", "lone surrogates come out as what can be written", ends="error")(r"""
        display("\ud800")
        class Odd:
            def __repr__(self): return "\ud800" * 10
            def _repr_html_(self): return "\udfff"
            def _repr_mimebundle_(self): return {"text/\ud800": "\ud800"}
        display(Odd())
        raise type("Err\ud800", (Exception,), {})("\ud800")
        """),
    attack("huge-result", "a result is cut", ends="ok memory")("'r' * 30_000_000"),
    attack("huge-message", "an exception's message and name are cut", ends="error")(
        "raise type('E' * 1_000_000, (Exception,), {})('m' * 20_000_000)"
    ),
    attack("long-traceback", "a traceback is cut", ends="error killed timeout", timeout_s=0.6)("""
        sys.setrecursionlimit(100_000)
        def down(n):
            down(n + 1)
        down(0)
        """),
    attack(
        "wide-group",
        "a group of many exceptions is cut",
        ends="error memory timeout killed",
        timeout_s=0.6,
        slow=True,
    )("""
        errors = []
        for number in range(3000):
            try:
                raise ValueError(number) from KeyError(number)
            except ValueError as error:
                errors.append(error)
        raise ExceptionGroup("many", [ExceptionGroup(str(n), errors) for n in range(20)])
        """),
    attack(
        "chained-for-ever",
        "a chain without end, or a ring, is cut",
        ends="error killed memory timeout",
        timeout_s=0.6,
        slow=True,
    )("""
        first = last = ValueError("x")
        for number in range(50_000):
            link = ValueError(number)
            last.__context__ = link
            last = link
        raise first
        """),
    attack("hostile-exception", "one whose every method fails is described nevertheless", ends="error")("""
        class Bad(Exception):
            def __str__(self): raise SystemExit(0)
            __repr__ = __str__
            __traceback__ = property(lambda self: 1 / 0)
            __cause__ = property(lambda self: 1 / 0)
            __notes__ = property(lambda self: 1 / 0)
            def __class_getitem__(cls, item): raise KeyError
        raise Bad
        """),
    attack("notes", "notes of an exception are cut", ends="error memory")("""
        error = ValueError("x")
        error.__notes__ = ["n" * 100_000] * 100
        raise error
        """),
    attack("huge-bundles", "displayed bundles are bounded in size and number")("""
        class Huge:
            def _repr_mimebundle_(self):
                return {f"text/{number}": "x" * 100_000 for number in range(50)}
        for _ in range(10_000):
            display(1)
        for _ in range(5):
            display(Huge())
        """),
    attack(
        "many-mime-types",
        "a bundle of many types is bounded",
        ends="ok error killed memory timeout",
        timeout_s=0.6,
    )("""
        class Many:
            def _repr_mimebundle_(self):
                return {"t" * number: "" for number in range(3000)}
        for _ in range(20):
            display(Many())
        """),
    attack("closed-streams", "a session without streams goes on, or ends", ends="ok error killed")(
        "for each in (0, 1, 2): os.close(each)",
        "print('x')",
        "sys.stdout = None; sys.stderr = 5; sys.stdin = None",
        "print('y'); input()",
    ),
    attack(
        "stream-of-its-own",
        "one that never returns is only the code's own",
        ends="timeout error",
        timeout_s=0.3,
    )("""
        class Stream:
            closed = property(lambda self: 1 / 0)
            def write(self, text): raise KeyboardInterrupt
            def flush(self):
                while True:
                    pass
        sys.stdout = Stream()
        """),
    attack("exit", "whatever the code exits with is an ordinary end", ends="error")(
        "sys.exit('x' * 10_000_000)", "raise SystemExit(object())", "sys.exit(2 ** 70)"
    ),
    attack("hard-exit", "an exit past Python ends the session, and is told", ends="killed")("os._exit(0)"),
)
