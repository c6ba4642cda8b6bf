"""The interpreter's own channel to the supervisor, in the hands of the code."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from collections.abc import Callable
from textwrap import dedent
from typing import Any, Final

from openenv_core.sandbox import Execution

from .model import EVERYWHERE, Attack, Stage, attacks_held_at

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


attack = attacks_held_at(EVERYWHERE)


def forged(name: str, contained: str, **more: Any) -> Callable[[str], Attack]:
    """Return what makes an attack by answers of its own."""
    return lambda code: attack(name, contained, **more)(forging(code))


ATTACKS = (
    forged("garbage", "bytes that are no answer end the session", ends="killed")(
        "channel.sendall(b'\\xff' * 4096)\ntime.sleep(1)"
    ),
    forged("huge-length", "an answer that announces gigabytes is not waited for", ends="killed")(
        "channel.sendall(struct.pack('!II', 100, 0xFFFFFFFF))\ntime.sleep(1)"
    ),
    forged(
        "half-answer", "one that never ends is ended by the time-out", ends="timeout killed", timeout_s=0.3
    )("channel.sendall(struct.pack('!II', 100, 100) + b'{')\ntime.sleep(1)"),
    forged("one-byte-at-a-time", "crumbs are still one answer", ends="ok timeout killed", timeout_s=0.5)(
        "for byte in answer(expected()): channel.sendall(bytes([byte]))\ntime.sleep(1)"
    ),
    forged("deep-json", "nested JSON is refused without a crash", ends="killed")("""
        deep = b"[" * 200_000
        channel.sendall(struct.pack("!II", len(deep), 0) + deep)
        time.sleep(1)
        """),
    forged("large-numbers", "numbers of a million digits are not computed", ends="killed")("""
        head = b'{"id": ' + b"9" * 250_000 + b"}"
        channel.sendall(struct.pack("!II", len(head), 0) + head)
        time.sleep(1)
        """),
    attack("wrong-shapes", "values of every other type are refused", ends="killed", slow=True)(
        *(
            forging(f"channel.sendall(answer(**{{'number': expected(), **{change}}}))\ntime.sleep(1)")
            for change in (
                {"status": "sandbox_error"},
                {"exit_code": -1},
                {"lengths": [-6, 12]},
                {"outputs": [["x", ["y"]]]},
                {"error": {"ename": []}},
                {"max_rss": 1 << 80},
            )
        )
    ),
    forged("two-answers", "a second answer ends the session", ends="killed ok")(
        "channel.sendall(answer(expected()) * 2)\ntime.sleep(1)"
    ),
    forged("gigabytes", "an endless answer ends the session", ends="killed")("""
        while True:
            channel.sendall(b"x" * 1_000_000)
        """),
    forged(
        "maximal-answer",
        "the largest that is allowed slows nobody",
        ends="killed ok",
        timeout_s=6.0,
        slow=True,
    )("""
        body = b"x" * (8 << 20)
        head = {"id": expected(), "status": "ok", "exit_code": 0, "text": True, "outputs": [], "truncated": False,
                "count": 1, "max_rss": 1, "lengths": [len(body)], "error": {"ename": "x", "evalue": "y", "traceback": ["z"] * 60_000}}
        data = json.dumps(head).encode()[:250_000]
        channel.sendall(struct.pack("!II", len(data), len(body)) + data + body)
        time.sleep(1)
        """),
    forged("many-pieces", "one of very many small pieces slows nobody", ends="killed ok", timeout_s=6.0)("""
        mimes = ["a"] * 25_000
        channel.sendall(answer(expected(), text=False, outputs=[["display_data", mimes]], lengths=[0] * 24_999 + [6]))
        time.sleep(1)
        """),
    attack("closed", "a session without a channel ends", ends="killed")("os.close(3)\ntime.sleep(1)"),
    attack("shut-down", "a session that says it has nothing more to say ends", ends="killed")(
        "socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_RDWR)\ntime.sleep(1)"
    ),
    attack("replaced", "another descriptor in its place is none", ends="killed timeout ok", timeout_s=0.5)(
        "one, other = socket.socketpair()\nos.dup2(one.fileno(), 3)\n1"
    ),
    forged(
        "descriptors", "descriptors that are sent along are nobody's", ends="killed timeout ok", timeout_s=0.5
    )("""
        import array
        for _ in range(50):
            attempt(channel.sendmsg, [b""], [(1, 1, array.array("i", [1] * 50))])
        attempt(channel.sendmsg, [b"x"], [(1, 1, array.array("i", [0, 1, 2, 3] * 60))])
        time.sleep(1)
        """),
    attack("dying-between-cells", "an end between two cells is the code's own", ends="ok killed")(
        *(
            f"threading.Thread(target=lambda: (time.sleep({late}), os._exit(0))).start()"
            for late in (0.0, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005)
        )
    ),
    forged("reading-ahead", "whoever reads the requests has none but its own")("""
        channel.setblocking(False)
        must_fail("reading", channel.recv, 100)
        must_fail("peeking", channel.recv, 100, 2)
        channel.setblocking(True)
        """),
    forged("out-of-band", "nothing can be sent past the answer", ends="killed timeout ok", timeout_s=0.3)(
        "attempt(channel.send, b'x', 1)\ntime.sleep(1)"
    ),
    attack("non-blocking", "a channel that was changed is mended, or ends it", ends="ok killed error")(
        "os.set_blocking(3, False)", "'x' * 3_000_000"
    ),
    attack("early-answer", "an answer in advance gains nothing in what follows", ends="ok killed timeout")(
        early_answer
    ),
    attack("answer-for-the-next", "no request is answered before it is asked", ends="ok killed")(
        answer_for_the_next
    ),
    attack("answers-between", "what nobody waits for is not kept for others", ends="ok killed timeout")(
        answers_between
    ),
)
