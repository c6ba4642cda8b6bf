"""Suites of tests as graders: their guarantee is weaker, and known tricks still fail."""

import json
from types import SimpleNamespace

import pytest

from envs.code_interpreter_env.grading import (
    Grader,
    NoAttemptsLeftError,
    SuiteTask,
    TaskSession,
    parse_task,
    public_view,
)
from openenv_core.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

PUBLIC = "from solution import add\ndef test_small():\n    assert plain(add(1, 2)) == 3\n"
HIDDEN = """
import math
from solution import add

def test_sum():
    assert plain(add(20, 22)) == 42

def test_float():
    assert math.isclose(plain(add(0.1, 0.2)), 0.3)

async def test_len():
    assert len("abc") == 3 and isinstance(add(1, 1), int)
"""

SHORT = """
import math
from solution import add

def test_float():
    assert len("abc") == 3 and math.isclose(plain(add(0.1, 0.2)), 0.3)
"""


def task(**more: object) -> SuiteTask:
    line = {"id": "s", "kind": "suite", "prompt": "?", "public": PUBLIC, "hidden": HIDDEN}
    found = parse_task(json.dumps({**line, "limits": {"timeout_s": 20.0, "total_s": 60.0}, **more}))
    assert isinstance(found, SuiteTask)
    return found


WRONG = "def add(a, b): return 41\n"

TRICKS = {
    "prints": (f"print('4 passed')\n{WRONG}", "wrong_answer"),
    "ends at import": ("import sys\nsys.exit(0)", "error"),
    "ends at import, hard": ("import os\nos._exit(0)", "killed"),
    "ends in a call": ("import sys\ndef add(a, b): sys.exit(0)", None),
    "ends in a call, hard": ("import os\ndef add(a, b): os._exit(0)", "killed"),
    "ends at the end": (f"import atexit, os\natexit.register(os._exit, 0)\n{WRONG}", "wrong_answer"),
    "equal to everything": (
        "class L:\n"
        "    def __eq__(s, o): return True\n"
        "    __lt__ = __le__ = __gt__ = __ge__ = __eq__\n"
        "    def __float__(s): return 0.3\n"
        "def add(a, b): return L()",
        "wrong_answer",
    ),
    "failures are none": (
        f"import builtins\nclass Fine(Exception): pass\nbuiltins.AssertionError = Fine\n{WRONG}",
        "wrong_answer",
    ),
    "replaced functions": (
        f"import builtins, math\nmath.isclose = lambda *a, **k: True\nbuiltins.len = lambda x: 3\n{WRONG}",
        "wrong_answer",
    ),
    "a replaced module": (
        "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a: True\n"
        f"sys.modules['math'] = m\n{WRONG}",
        "wrong_answer",
    ),
    "a replaced harness": (
        f"import __main__\n__main__._run_one_test = lambda s, n, t: t[::-1]\n{WRONG}",
        "wrong_answer",
    ),
    "a rewritten harness": (
        "import __main__\n__main__._run_one_test.__code__ = (lambda source, name, token: token[::-1]).__code__\n"
        f"{WRONG}",
        "wrong_answer",
    ),
    "left for the next test": (
        "import __main__, builtins\ndef add(a, b):\n"
        "    __main__._run_one_test = lambda source, name, token: token[::-1]\n"
        "    builtins.exec = lambda *a: None\n    return 0",
        "wrong_answer",
    ),
    "a tracer": (f"import sys\nsys.settrace(lambda *a: sys.exit(0))\n{WRONG}", "error"),
    "compiles what it likes": (
        f"import builtins\nreal = compile\nbuiltins.compile = lambda s, *a, **k: real('def test_sum(): pass\\n"
        f"test_small = test_float = test_len = test_sum', *a, **k)\n{WRONG}",
        "wrong_answer",
    ),
    "no such function": ("def plus(a, b): return a + b", "error"),
}


@pytest.mark.parametrize("name", TRICKS)
async def test_no_trick_passes(sandbox: Sandbox, name: str) -> None:
    code, category = TRICKS[name]
    verdict = await Grader(sandbox).grade(task(hidden=SHORT), code)
    assert (verdict.reward, verdict.guarantee) == (0.0, "shared")
    for case in verdict.cases:
        assert not case.passed
        assert category is None or case.category == category, verdict


FORGES = """
import sys, time

def add(a, b):
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        frame = frame.f_back
    answer = {"id": frame.f_locals["request"]["id"], "status": "ok", "exit_code": 0, "text": True, "outputs": [],
              "truncated": False, "count": 1, "max_rss": 1}
    forged = frame.f_globals["frames"].pack_answer(answer, [TEXT])
    held = vars(frame.f_locals["self"]).values()
    next(item for item in held if type(item).__name__ == "socket").sendall(forged)
    time.sleep(60)
"""


@pytest.mark.parametrize("text", ["null", "true", '"passed"'])
async def test_a_forged_answer_without_the_token_is_worth_nothing(sandbox: Sandbox, text: str) -> None:
    verdict = await Grader(sandbox).grade(task(hidden=""), FORGES.replace("TEXT", repr(text)))
    assert [(case.passed, case.category) for case in verdict.cases] == [(False, "error")]
    assert verdict.cases[0].message == "the test did not come to its end", "the forgery itself went wrong"
    assert verdict.reward == 0.0


async def test_right_solution_passes_each_test_and_nothing_hidden_is_revealed(sandbox: Sandbox) -> None:
    right = await Grader(sandbox).grade(task(), "def add(a, b): return a + b")
    assert (right.reward, right.passed, right.total) == (1.0, 4, 4)
    half = await Grader(sandbox).grade(task(scoring="fraction"), "def add(a, b): return int(a + b)")
    assert [case.category for case in half.cases] == ["passed", "passed", "wrong_answer", "passed"]
    assert half.reward == pytest.approx(2 / 3)
    verdict = await Grader(sandbox).grade(task(), "def add(a, b): raise ValueError((a, b))")
    assert verdict.cases[0].message == "ValueError: (1, 2)"
    text = verdict.model_dump_json(exclude={"grading_time_s"})
    assert [hidden for hidden in ("test_sum", "20", "isclose") if hidden in text] == []


@pytest.mark.soak
async def test_a_test_that_takes_too_long(sandbox: Sandbox) -> None:
    brief = task(limits={"timeout_s": 2.0, "total_s": 60.0})
    verdict = await Grader(sandbox).grade(brief, "def add(a, b):\n    while a == 20: pass\n    return a + b")
    assert (verdict.reward, verdict.reason) == (None, "timeout")
    assert [case.category for case in verdict.cases] == ["passed", "timeout", "not_run", "not_run"]


async def test_an_episode_takes_as_many_submissions_as_its_task(sandbox: Sandbox) -> None:
    brief = task(attempts=2, files={"data.txt": "7"}, starter="...")
    session = TaskSession(brief, Grader(sandbox))
    assert session.attempts_left == 2
    assert "test_sum" not in json.dumps(public_view(brief))
    assert (await session.submit(WRONG)).reward == 0.0
    assert not session.done
    reads = "def add(a, b): return a + b if open('data.txt').read() == '7' else None"
    assert (await session.submit(reads)).reward == 1.0
    assert session.attempts_left == 0
    with pytest.raises(NoAttemptsLeftError):
        await session.submit(reads)
    solved = TaskSession(task(attempts=5), Grader(sandbox))
    await solved.submit("def add(a, b): return a + b")
    assert solved.done

    async def full(limits: object) -> None:
        raise OSError("too many open files")

    failed = TaskSession(task(), Grader(SimpleNamespace(open=full)))  # type: ignore[arg-type]
    verdict = await failed.submit(WRONG)
    assert (verdict.reward, verdict.reason) == (None, "sandbox_error")
    assert (failed.attempts_left, failed.done) == (1, False)  # it is not counted
