"""Reward functions that do what the tests ask of them, imported by the processes of the pool; and waits for those."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

HOLD_S = 600


def compute_reward(prompt: Any, response: str, target: Any) -> Any:
    """The response names what to do, and the target with what."""
    return globals()[f"do_{response}"](target)


def exact(prompt: str, response: str, target: str) -> float:
    return float(response == target)


def none(prompt: str, response: str, target: str) -> None:
    return None


def half(prompt: str, response: str, target: str) -> float:
    return 0.5


def one_argument(prompt: str) -> float:
    return 1.0


def do_return(target: Any) -> Any:
    strange = {"nan": math.nan, "inf": math.inf, "list": [1.0], "fraction": Fraction(1, 4)}
    return strange.get(target, target)


def do_pid(target: Any) -> float:
    return float(os.getpid())


def do_raise(target: str) -> None:
    raise ValueError(f"the answer {target!r} is not one")


def is_first(target: str) -> bool:
    """Whether this is asked for the first time; the target is a file that says so to all processes."""
    known = Path(target).exists()
    Path(target).touch()
    return not known


def do_raise_once(target: str) -> float:
    if is_first(target):
        raise ValueError("the first time")
    return 1.0


def do_exit(target: int) -> None:
    sys.exit(target)


def do_die(target: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def do_die_once(target: str) -> float:
    if is_first(target):
        do_die(target)
    return 1.0


def do_say_and_sleep(target: str) -> None:
    """Writes its process id, and never comes back."""
    write(target, os.getpid())
    time.sleep(HOLD_S)


def do_backtrack(target: str) -> bool:
    """Holds the interpreter's lock, so that no signal handler of Python's would run."""
    write(target, os.getpid())
    return re.fullmatch(r"(a|aa)+b", "a" * 80) is not None


def do_start_daemons(target: str) -> None:
    """Starts a child, one in a session of its own, and one that has lost its parent; and waits."""
    sleep = ["sleep", str(HOLD_S)]
    child = subprocess.Popen(sleep)
    other = subprocess.Popen(sleep, start_new_session=True)
    daemon = ["sh", "-c", f"setsid sleep {HOLD_S} >/dev/null & echo $!"]
    orphan = subprocess.run(daemon, stdout=subprocess.PIPE, check=True)
    write(target, os.getpid(), child.pid, other.pid, int(orphan.stdout))
    time.sleep(HOLD_S)


def write(target: str, *pids: int) -> None:
    partial = Path(f"{target}.partial")
    partial.write_text(" ".join(map(str, pids)))
    partial.rename(target)


def do_hold_once(target: str) -> float:
    """Waits with two daemons where it is asked for the first time."""
    if Path(target).exists():
        return 1.0
    do_start_daemons(target)
    return 0.0
