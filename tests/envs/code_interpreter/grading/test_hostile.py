"""Submissions that want the reward rather than the answer."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from envs.code_interpreter_env.grading import (
    FunctionTask,
    Grader,
    JsonlTasks,
    NumericTask,
    StdioTask,
    Verdict,
    parse_task,
)
from envs.code_interpreter_env.tasks import SHIPPED
from openenv_core.sandbox import Execution, Limits, Sandbox, SandboxUnavailableError

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Generous, because machines are busy; what is to take too long says so itself.
AMPLE = {"timeout_s": 20.0, "total_s": 60.0}


def task(cases: Sequence[tuple[list[Any], Any]], **more: Any) -> FunctionTask:
    hidden = [{"args": args, "expected": expected} for args, expected in cases]
    line = {"id": "t", "kind": "function", "prompt": "?", "entry": "f", "hidden": hidden, "limits": AMPLE}
    found = parse_task(json.dumps({**line, **more}))
    assert isinstance(found, FunctionTask)
    return found


def categories(verdict: Verdict) -> list[str]:
    return [case.category for case in verdict.cases]


ONE = task([([1], 1), ([2], 2)])

LIES = {
    """
class Liar:
    def __eq__(self, other): return True
    __hash__ = None
    def __repr__(self): return '1'
def f(x): return Liar()""": "bad_value",
    "class T(str):\n    def __eq__(s, o): return True\ndef f(x): return T('1')": "bad_value",
    "class I(int):\n    def __eq__(s, o): return True\ndef f(x): return I(9)": "bad_value",
    "def f(x): return True if x == 1 else x + 1": "wrong_answer",
    "def f(x): return float(x)": "wrong_answer",
    "def f(x):\n    v = x\n    for _ in range(10000): v = [v]\n    return v": "bad_value",
    "def f(x):\n    v = []\n    v.append(v)\n    return v": "bad_value",
    "def f(x): return [0] * 1_000_000": "bad_value",
    "def f(x): return 1 << 20_000_000": "bad_value",
    "def f(x):\n    while True: yield x": "bad_value",
    "def f(x): raise ValueError(x)": "error",
    "class E(BaseException):\n    def __str__(self): raise E\ndef f(x): raise E": "error",
    "def f(x): return f(x)": "error",
    "": "missing",
    "f = 1": "error",
    "def f(x:": "error",
    "import os\ndef f(x): os._exit(0)": "killed",
    "def f(x): raise SystemExit(0)": "killed",
    "import os\nos._exit(0)": "killed",
    "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)": "killed",
    """
import os
def f(x):  # a broken answer, wherever it goes
    for d in range(3, 64):
        try: os.write(d, b'\\0' * 64)
        except OSError: pass
    return x + 1""": "killed",
    "def f(x):\n    while True: print('y' * 100000)": "output_limit",
    "def f(x): return len(bytearray(1 << 34))": "memory",
    """
import sys
def f(x):  # a serialiser of its own
    frame = sys._getframe()
    while 'request' not in frame.f_locals: frame = frame.f_back
    frame.f_globals['dumps'] = lambda *a, **k: b'true'
    return x""": "wrong_answer",
}


@pytest.mark.parametrize("code", LIES)
async def test_cheating_submissions_earn_nothing(sandbox: Sandbox, code: str) -> None:
    verdict = await Grader(sandbox).grade(ONE, code)
    assert (verdict.reward, verdict.reason, set(categories(verdict))) == (0.0, "failed", {LIES[code]})


async def test_expected_values_are_nowhere_in_the_process(sandbox: Sandbox) -> None:
    secret = f"secret-{secrets.token_hex(8)}"
    code = """
import gc, os, sys

def everything():
    seen = set()
    waiting = list(gc.get_objects())
    frame = sys._getframe()
    while frame is not None:
        waiting += [frame.f_globals, frame.f_locals]
        frame = frame.f_back
    waiting += [dict(os.environ), sys.argv, list(sys.modules.values())]
    while waiting and len(seen) < 400_000:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, str) and item.startswith("secret-") and len(item) == 23:
            return item
        waiting += gc.get_referents(item)
    return "nothing"

def f(x):
    return everything() if x else "secret-" + "0" * 16

hidden = "secret-" + "f" * 16
"""
    probe = await Grader(sandbox).grade(task([([1], "secret-" + "f" * 16)]), code)
    assert probe.reward == 1.0, "the search itself finds nothing"
    code = code.replace('hidden = "secret-" + "f" * 16', "").replace('"secret-" + "0" * 16', '"no"')
    verdict = await Grader(sandbox).grade(task([([1], secret)]), code)
    assert (verdict.reward, categories(verdict)) == (0.0, ["wrong_answer"])


async def test_the_files_of_tasks_cannot_be_read(sandbox: Sandbox) -> None:
    paths = [str(path) for path in JsonlTasks(SHIPPED).paths]
    code = """
def f(paths):
    found = []
    for path in paths:
        try:
            found.append(open(path).read(1))
        except OSError:
            found.append(None)
    return found
"""
    assert len(paths) == 3
    verdict = await Grader(sandbox).grade(task([([paths], [None] * 3), ([["/dev/null"]], [""])]), code)
    assert verdict.reward == 1.0


@pytest.mark.soak
async def test_a_case_that_takes_too_long_is_worth_none(sandbox: Sandbox) -> None:
    slow = task([([1], 1), ([2], 2), ([3], 3)], limits={"timeout_s": 3.0, "total_s": 60.0})
    code = "def f(x):\n    while x == 2: pass\n    return x"
    verdict = await Grader(sandbox).grade(slow, code)
    assert (verdict.reward, verdict.reason, verdict.timeout_scope) == (None, "timeout", "case")
    assert categories(verdict) == ["passed", "timeout", "not_run"]
    assert (await Grader(sandbox, timeout_reward=0.0).grade(slow, code)).reward == 0.0
    never = await Grader(sandbox).grade(slow, "while True: pass\ndef f(x): return x")
    assert (never.reward, categories(never)) == (None, ["timeout", "not_run", "not_run"])


@pytest.mark.soak
async def test_total_time_limit_ends_grading(sandbox: Sandbox) -> None:
    slow = task([([at], at) for at in range(40)], limits={"timeout_s": 5.0, "total_s": 2.0})
    verdict = await Grader(sandbox).grade(slow, "import time\ndef f(x):\n    time.sleep(0.2)\n    return x")
    assert (verdict.reward, verdict.reason, verdict.timeout_scope) == (None, "timeout", "total")
    assert categories(verdict)[-1] == "not_run"
    with pytest.raises(ValueError, match="timeout_reward"):
        Grader(sandbox, timeout_reward=-1.0)


async def test_verdict_reveals_nothing_of_a_hidden_case(sandbox: Sandbox) -> None:
    seen = [{"args": ["seen-input"], "expected": "seen-answer"}]
    some = task([(["hidden-input"], "hidden-answer")], public=seen)
    tells = "def f(x):\n    print(x)\n    raise ValueError(x)"
    for code in (tells, "def f(x): return x", "def f(x): return [x] if x[0] == 's' else object()", "1/0"):
        verdict = await Grader(sandbox).grade(some, code)
        text = verdict.model_dump_json()
        assert "hidden-" not in text
        assert "seen-input" in text
        assert verdict.cases[0].expected == "'seen-answer'"
        assert verdict.cases[1].message is verdict.cases[1].got is verdict.cases[1].shown_input is None
    case_result = (await Grader(sandbox).grade(some, tells)).cases[0]
    assert case_result.message == "ValueError: seen-input"


async def test_state_is_kept_between_cases_only_where_the_grader_says_so(sandbox: Sandbox) -> None:
    counted = task([([0], 1), ([0], 2), ([0], 3)])
    code = "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n"
    assert (await Grader(sandbox).grade(counted, code)).reward == 1.0
    fresh = await Grader(sandbox, fresh_per_case=True).grade(counted, code)
    assert categories(fresh) == ["passed", "wrong_answer", "wrong_answer"]


async def test_exit_or_changes_in_one_case_do_not_affect_the_next(sandbox: Sandbox) -> None:
    some = task([([1], 1), ([2], 2), ([3], 3), ([4], 4)], scoring="fraction")
    code = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    verdict = await Grader(sandbox).grade(some, code)
    assert (categories(verdict), verdict.reward) == (["passed", "killed", "passed", "passed"], 0.75)
    sort = task([([[2, 1]], [1, 2])] * 3)
    sorts = "def f(x):\n    x.sort()\n    return x"
    assert (await Grader(sandbox).grade(sort, sorts)).reward == 1.0
    assert sort.hidden[0].args == [[2, 1]]
    # Side by side too.
    codes = [f"def f(x): return x + {at % 2}" for at in range(4)]
    verdicts = await asyncio.gather(*(Grader(sandbox).grade(ONE, code) for code in codes))
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0] * 2


async def test_programs_are_compared_by_what_they_print(sandbox: Sandbox) -> None:
    hidden = [{"stdin": "3\n", "stdout": "1 0.5\n"}, {"stdin": "", "stdout": ""}]
    line = {"id": "s", "kind": "stdio", "prompt": "?", "hidden": hidden, "float_tol": 1e-6}
    echo = parse_task(json.dumps({**line, "limits": {**AMPLE, "output_bytes": 1024}}))
    assert isinstance(echo, StdioTask)
    right = "import sys\nif sys.stdin.read(): print(1, 0.5000001)\nsys.exit()"
    assert (await Grader(sandbox).grade(echo, right)).reward == 1.0
    for code, first in (
        ("print('1.0 0.5')", "wrong_answer"),
        ("print('1 nan')", "wrong_answer"),
        ("print('1 0.5 ')\nraise SystemExit(3)", "error"),
        ("print('1 0.5')\n1/0", "error"),
        ("print('1 0.5' + ' ' * 5000)", "output_limit"),
        ("import os\nprint('1 0.5', flush=True)\nos._exit(0)", "killed"),
    ):
        assert categories(await Grader(sandbox).grade(echo, code))[0] == first
    # Each case has an interpreter and a workspace of its own.
    keeper = "import os\nprint('1 0.5' if not os.path.exists('mark') else '')\nopen('mark', 'w').close()"
    assert categories(await Grader(sandbox).grade(echo, keeper)) == ["passed", "wrong_answer"]


ANSWERS = (
    ("stdout", "print('x')\nprint(r'\\boxed{1/3}')\nprint()", "passed"),
    ("stdout", "print(1/3, 'or so')", "bad_value"),
    ("stdout", "", "missing"),
    ("variable", "from fractions import Fraction\nanswer = Fraction(1, 3)", "passed"),
    ("variable", "from decimal import Decimal\nanswer = Decimal(1) / 3", "passed"),
    ("variable", "answer = True", "bad_value"),
    ("variable", "answer = [1/3]", "bad_value"),
    ("variable", "class A:\n    def __str__(s): return '1/3'\nanswer = A()", "passed"),
    ("variable", "class A:\n    def __eq__(s, o): return True\nanswer = A()", "bad_value"),
    ("variable", "answer = float('nan')", "bad_value"),
    ("variable", "", "missing"),
    ("function", "def answer(): return 1/3", "passed"),
    ("function", "def answer(): return 10**5000", "bad_value"),
    ("function", "def answer(): 1/0", "error"),
    ("text", "so it is 1/3", "bad_value"),
    ("text", r"therefore \boxed{\frac{1}{3}}!", "passed"),
    ("text", r"\boxed{0.5}", "wrong_answer"),
)


async def test_numbers_are_read_from_where_the_task_says(sandbox: Sandbox) -> None:
    line = {"id": "n", "kind": "numeric", "prompt": "?", "answer": "1/3"}
    for answer_from, code, category in ANSWERS:
        third = NumericTask.model_validate({**line, "answer_from": answer_from})
        verdict = await Grader(sandbox).grade(third, code)
        assert categories(verdict) == [category], (code, verdict)
        assert "0.5" not in verdict.model_dump_json(exclude={"grading_time_s"})


async def test_interpreters_that_only_run_code_are_given_calls_as_code(sandbox: Sandbox) -> None:
    async def open_without_call(limits: Limits) -> Any:  # as hosted ones have none
        inner = await sandbox.open(limits)
        names = ("session_id", "execute", "put_file", "get_file", "list_files", "restart", "close")
        return SimpleNamespace(isolation="remote", **{name: getattr(inner, name) for name in names})

    grader = Grader(SimpleNamespace(open=open_without_call))  # type: ignore[arg-type]
    both = task([([[1, 2]], {"$tuple": [1, 2]}), ([[]], {"$tuple": []})])
    right = await grader.grade(both, "def f(x):\n    print('some noise')\n    return tuple(x)")
    assert (right.reward, right.isolation) == (1.0, "remote")
    for code, category in (
        ("def f(x): return x", "wrong_answer"),
        ("def g(x): return x", "missing"),
        ("def f(x): return 'y' * 200_000", "bad_value"),
        ("print = lambda *a: None\nimport builtins\nbuiltins.print = print\ndef f(x): return x", "bad_value"),
        ("import os\ndef f(x): os._exit(0)", "killed"),
    ):
        verdict = await grader.grade(both, code)
        assert (verdict.reward, set(categories(verdict))) == (0.0, {category}), code


class FakeBroken:
    """Breaks where a real sandbox hardly ever does."""

    session_id = isolation = "fake"
    closed = 0

    def __init__(self, where: str) -> None:
        self._where = where

    async def open(self, limits: Limits) -> "FakeBroken":
        if self._where == "open":
            raise SandboxUnavailableError("none left")
        return self

    async def execute(self, code: str, **_: Any) -> Execution:
        if self._where == "raise":
            raise SandboxUnavailableError("gone")
        return Execution(status="sandbox_error" if self._where == "execute" else "ok", reason="zygote gone")

    async def call(self, *_: Any, **__: Any) -> Any:
        raise OSError("connection lost")

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("where", ["open", "execute", "raise", "call"])
async def test_sandbox_failure_is_never_blamed_on_the_submission(where: str) -> None:
    broken = FakeBroken(where)
    verdict = await Grader(broken, timeout_reward=0.0).grade(ONE, "def f(x): return x")  # type: ignore[arg-type]
    assert (verdict.reward, verdict.reason) == (None, "sandbox_error")
    assert broken.closed == (where != "open")
