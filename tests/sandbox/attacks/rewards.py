"""Verdicts: what is judged outside must not be decided inside."""

from .model import EVERYWHERE, Stage, attacks_held_at

PLAIN = (int, float, str, bool, bytes, list, dict, tuple, set, frozenset, type(None), complex)


async def _judge(stage: Stage, words: str) -> None:
    """Call the solution as a grader does, and compare outside."""
    call = await stage.session.call("add", [2, 40], timeout_s=1.0)
    stage.executions.append(call.execution)
    # `type` first: a value with an __eq__ of its own would have to be made by the decoder, which makes none.
    if type(call.value) not in PLAIN:
        stage.breaches.append(f"{words}: a value of {type(call.value)}")
    if call.execution.status != "ok" and call.value is not None:
        stage.breaches.append(f"{words}: a value without an ok")


async def always_equal(stage: Stage) -> None:
    """The solution returns something that is equal to everything."""
    await stage.run("""
        class Equal(int):
            def __eq__(self, other): return True
            def __hash__(self): return 0
        class Words(str):
            __eq__ = lambda self, other: True
        class Items(list):
            __eq__ = lambda self, other: True
        kinds = [Equal(7), Words("x"), Items([1]), {Equal(1): Words("y")}, float("nan"), (Items(),)]
        def add(a, b): return kinds.pop()
    """)
    for _ in range(6):
        await _judge(stage, "a subclass")


async def patched_libraries(stage: Stage) -> None:
    """The code replaces what the runner stands on, in every module that it finds."""
    await stage.run("""
        import builtins, gc, json, struct, types
        def add(a, b): return 42
        json.dumps = json.loads = lambda *a, **k: "{}"
        struct.pack = lambda *a: b""
        for name in ("isinstance", "len", "type", "repr", "getattr", "compile", "eval", "str", "dict", "list", "map"):
            setattr(builtins, name, lambda *a, **k: True)
    """)
    await _judge(stage, "patched libraries")


async def runner_taken_over(stage: Stage) -> None:
    """The code finds the runner by its frames and makes it answer what it wants."""
    await stage.run("""
        frame = sys._getframe()
        while frame:
            runner = frame.f_locals.get("self")
            if type(runner).__name__ == "RequestRunner":
                real = type(runner).answer
                def answer(self, request):
                    kept = real(self, {**request, "op": "execute", "code": "42"})
                    return kept
                type(runner).answer = answer
            frame = frame.f_back
        def add(a, b): raise ValueError
    """)
    await _judge(stage, "a runner that was taken over")


async def exits(stage: Stage) -> None:
    """The solution leaves with success before anything is compared."""
    for code in (
        "sys.exit(0)",
        "os._exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), 9)",
    ):
        await stage.run(f"def add(a, b):\n    {code}")
        call = await stage.session.call("add", [1, 2], timeout_s=1.0)
        stage.executions.append(call.execution)
        if call.value is not None:
            stage.breaches.append(f"{code} returned {call.value!r}")


async def endless_value(stage: Stage) -> None:
    """The solution returns values that are deep, rings, huge, or full of code."""
    for code in (
        "x = []; x.append(x); return x",
        "x = []\n    for _ in range(100_000): x = [x]\n    return x",
        "return 'x' * 50_000_000",
        "return 10 ** 200_000",
        "return [0] * 10_000_000",
        "return {'__tag__': 1, '$': 2, 'type': 'set', 'tuple': [1]}",
        "return lambda: 0",
        "return object()",
        "return type('X', (dict,), {'items': lambda s: iter(int, 1)})(a=1)",
    ):
        await stage.run(f"def add(a, b):\n    {code}")
        await _judge(stage, code)


async def arguments_are_copies(stage: Stage) -> None:
    """The solution changes its arguments in place: the grader's own stay what they are."""
    await stage.run("def add(a, b):\n    a.append(99); a.clear(); return b")
    mine = [1, 2]
    await stage.session.call("add", [mine, 0], timeout_s=1.0)
    if mine != [1, 2]:
        stage.breaches.append("an argument was changed through the call")


async def value_by_forgery(stage: Stage) -> None:
    """The code forges the value of a call: it may lie about its own, and about nothing else."""
    from .channel import forging

    await stage.run(
        forging("""
        def add(a, b):
            channel.sendall(answer(expected(), lengths=[2], body=b"42")[:-6] + b"42")
            time.sleep(5)
        """)
    )
    await _judge(stage, "a forged value")
    again = await stage.session.execute("1 + 1", timeout_s=1.0)
    stage.executions.append(again)
    if again.status == "ok" and again.result != "2":
        stage.breaches.append(f"a forged answer was taken for another request's: {again.result}")


ENDS = "ok error killed timeout memory"

attack = attacks_held_at(EVERYWHERE)

ATTACKS = (
    attack("always-equal", "only plain values come out: no comparison outside runs the code", ends=ENDS)(
        always_equal
    ),
    attack("patched-libraries", "the supervisor uses nothing that the code can replace", ends=ENDS)(
        patched_libraries
    ),
    attack("runner-taken-over", "a runner in the code's hands is only the code", ends=ENDS)(
        runner_taken_over
    ),
    attack("exit-with-success", "leaving early is no success of a call", ends=ENDS)(exits),
    attack("endless-values", "values are bounded, plain and without rings", ends=ENDS)(endless_value),
    attack("arguments", "arguments are copies", ends=ENDS)(arguments_are_copies),
    attack("forged-value", "a forged answer concerns the code's own call alone", ends=ENDS)(value_by_forgery),
)
