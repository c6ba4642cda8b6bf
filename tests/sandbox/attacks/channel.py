"""The interpreter's own channel to the supervisor, in the hands of the code."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from textwrap import dedent
from typing import Final

from openenv_core.sandbox import Execution

from .model import EVERYWHERE, Attack, Stage

_FORGE: Final = """
import gc, struct
channel = socket.socket(fileno=os.dup(3))
channel.setblocking(True)

def answer(number, **more):
    head = {"id": number, "status": "ok", "exit_code": 0, "text": True, "outputs": [], "truncated": False,
            "count": 99, "max_rss": 1, "lengths": [6], **more}
    text = more.pop("body", b"forged")
    data = json.dumps(head).encode()
    return struct.pack("!II", len(data), len(text)) + data + text

def expected():
    frame = sys._getframe()
    while frame:
        found = frame.f_locals.get("request")
        if type(found) is dict and "id" in found:
            return found["id"]
        frame = frame.f_back
"""

_LATER: Final = """
def later(data, wait=0.05):
    def write():
        time.sleep(wait)
        channel.sendall(data)
    threading.Thread(target=write, daemon=True).start()
"""


def forging(code: str) -> str:
    """Return code with what writes answers of its own in front of it."""
    return _FORGE + dedent(code)


async def early_answer(stage: Stage) -> None:
    """The code answers itself and goes on: its own result may be a lie, but the next one is not late or mixed up."""
    first = await stage.run(forging("channel.sendall(answer(expected()))\nwhile True: pass"), timeout_s=0.5)
    second = await stage.session.execute("21 * 2", timeout_s=1.0)
    _check_own(stage, first, second)
    third = await stage.session.execute("40 + 4", timeout_s=1.0)
    if third.status == "ok" and third.result != "44":
        stage.breaches.append(f"an answer went to another request: {third}")


async def answer_for_the_next(stage: Stage) -> None:
    """The code sends the answer to the request that comes after its own, before that is asked."""
    await stage.run(forging("channel.sendall(answer(expected() + 1))"))
    second = await stage.session.execute("21 * 2", timeout_s=1.0)
    if second.result == "forged":
        stage.breaches.append("the answer to a request was there before the request")


async def answers_between(stage: Stage) -> None:
    """A thread writes answers while nobody has asked anything."""
    await stage.run(_FORGE + _LATER + "later(answer(2) * 3, 0.0)")
    second = await stage.session.execute("21 * 2", timeout_s=1.0)
    third = await stage.session.execute("40 + 4", timeout_s=1.0)
    if third.status == "ok" and third.result != "44":
        stage.breaches.append(f"an answer went to another request: {third}")
    stage.executions.append(second)


def _check_own(stage: Stage, *done: Execution) -> None:
    stage.executions += done
    for each in done:
        if each.session_id != stage.session.session_id or each.isolation != stage.session.isolation:
            stage.breaches.append("an answer changed what is known without it")


ATTACKS = (
    Attack(
        name="garbage",
        contained="bytes that are no answer end the session",
        code=forging("channel.sendall(b'\\xff' * 4096)\ntime.sleep(1)"),
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="huge-length",
        contained="an answer that announces gigabytes is not waited for",
        code=forging("channel.sendall(struct.pack('!II', 100, 0xFFFFFFFF))\ntime.sleep(1)"),
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="half-answer",
        contained="an answer that never ends is ended by the time-out",
        code=forging("channel.sendall(struct.pack('!II', 100, 100) + b'{')\ntime.sleep(1)"),
        timeout_s=0.3,
        ends=("timeout", "killed"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="one-byte-at-a-time",
        contained="an answer in crumbs is still one answer",
        code=forging("for byte in answer(expected()): channel.sendall(bytes([byte]))\ntime.sleep(1)"),
        timeout_s=0.5,
        ends=("ok", "timeout", "killed"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="deep-json",
        contained="nested JSON is refused without a crash",
        code=forging("""
        deep = b"[" * 200_000
        channel.sendall(struct.pack("!II", len(deep), 0) + deep)
        time.sleep(1)
        """),
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="large-numbers",
        contained="numbers of a million digits are not computed",
        code=forging("""
        head = b'{"id": ' + b"9" * 250_000 + b"}"
        channel.sendall(struct.pack("!II", len(head), 0) + head)
        time.sleep(1)
        """),
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="wrong-shapes",
        contained="values of every other type are refused",
        code=tuple(
            forging(f"channel.sendall(answer(**{{'number': expected(), **{change}}}))\ntime.sleep(1)")
            for change in (
                {"status": "sandbox_error"},
                {"status": None},
                {"exit_code": -1},
                {"exit_code": "0"},
                {"lengths": [-6, 12]},
                {"lengths": "6"},
                {"outputs": [["x", ["y"]]]},
                {"outputs": {"a": 1}},
                {"error": {"ename": []}},
                {"count": True},
                {"max_rss": 1 << 80},
                {"text": 1},
            )
        ),
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
        slow=True,
    ),
    Attack(
        name="two-answers",
        contained="a second answer ends the session",
        code=forging("channel.sendall(answer(expected()) * 2)\ntime.sleep(1)"),
        ends=("killed", "ok"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="gigabytes",
        contained="an endless answer ends the session",
        code=forging("""
        while True:
            channel.sendall(b"x" * 1_000_000)
        """),
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="maximal-answer",
        contained="the largest answer that is allowed slows nobody",
        code=forging("""
        body = b"x" * (8 << 20)
        head = {"id": expected(), "status": "ok", "exit_code": 0, "text": True, "outputs": [], "truncated": False,
                "count": 1, "max_rss": 1, "lengths": [len(body)], "error": {"ename": "x", "evalue": "y", "traceback": ["z"] * 60_000}}
        data = json.dumps(head).encode()[:250_000]
        channel.sendall(struct.pack("!II", len(data), len(body)) + data + body)
        time.sleep(1)
        """),
        ends=("killed", "ok"),
        survives=None,
        timeout_s=6.0,
        holds=EVERYWHERE,
        slow=True,
    ),
    Attack(
        name="many-pieces",
        contained="an answer of very many very small pieces slows nobody",
        code=forging("""
        mimes = ["a"] * 25_000
        channel.sendall(answer(expected(), text=False, outputs=[["display_data", mimes]], lengths=[0] * 24_999 + [6]))
        time.sleep(1)
        """),
        ends=("killed", "ok"),
        survives=None,
        timeout_s=6.0,
        holds=EVERYWHERE,
    ),
    Attack(
        name="closed",
        contained="a session without a channel ends",
        code="os.close(3)\ntime.sleep(1)",
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="shut-down",
        contained="a session that says it has nothing more to say ends",
        code="socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_RDWR)\ntime.sleep(1)",
        ends=("killed",),
        survives=False,
        holds=EVERYWHERE,
    ),
    Attack(
        name="replaced",
        contained="another descriptor in the channel's place is none",
        code="one, other = socket.socketpair()\nos.dup2(one.fileno(), 3)\n1",
        ends=("killed", "timeout", "ok"),
        survives=None,
        timeout_s=0.5,
        holds=EVERYWHERE,
    ),
    Attack(
        name="descriptors",
        contained="descriptors that are sent along are nobody's",
        code=forging("""
        import array
        for _ in range(50):
            attempt(channel.sendmsg, [b""], [(1, 1, array.array("i", [1] * 50))])
        attempt(channel.sendmsg, [b"x"], [(1, 1, array.array("i", [0, 1, 2, 3] * 60))])
        time.sleep(1)
        """),
        timeout_s=0.5,
        ends=("killed", "timeout", "ok"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="dying-between-cells",
        contained="an end between two executions is the code's own, and never passes for the infrastructure's",
        code=tuple(
            f"threading.Thread(target=lambda: (time.sleep({late}), os._exit(0))).start()"
            for late in (0.0, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005)
        ),
        ends=("ok", "killed"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="reading-ahead",
        contained="whoever reads the requests has none but its own",
        code=forging("""
        channel.setblocking(False)
        must_fail("reading", channel.recv, 100)
        must_fail("peeking", channel.recv, 100, 2)
        channel.setblocking(True)
        """),
        holds=EVERYWHERE,
    ),
    Attack(
        name="out-of-band",
        contained="nothing can be sent past the answer",
        code=forging("attempt(channel.send, b'x', 1)\ntime.sleep(1)"),
        timeout_s=0.3,
        ends=("killed", "timeout", "ok"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="non-blocking",
        contained="a channel that the code has changed is mended, or ends the session",
        code=("os.set_blocking(3, False)", "'x' * 3_000_000"),
        ends=("ok", "killed", "error"),
        survives=None,
        holds=EVERYWHERE,
    ),
    Attack(
        name="early-answer",
        contained="an answer in advance gains nothing in what follows",
        act=early_answer,
        survives=None,
        ends=("ok", "killed", "timeout"),
        holds=EVERYWHERE,
    ),
    Attack(
        name="answer-for-the-next",
        contained="no request is answered before it is asked",
        act=answer_for_the_next,
        survives=None,
        ends=("ok", "killed"),
        holds=EVERYWHERE,
    ),
    Attack(
        name="answers-between",
        contained="answers that nobody waits for are not kept for somebody who does",
        act=answers_between,
        survives=None,
        ends=("ok", "killed", "timeout"),
        holds=EVERYWHERE,
    ),
)
