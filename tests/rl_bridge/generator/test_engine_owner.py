"""The process of an engine belongs to the one that started it, from before it loads anything."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_bridge.generator.vllm_api import OWNER_VARIABLE

pytestmark = pytest.mark.soak

WAIT_S = 60.0
REPOSITORY = str(Path(__file__).parents[3])
ENGINE = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: os._exit(3))  # as vLLM does before it loads anything of ours
import rl_bridge.generator.vllm_process
print("loads", flush=True)
sys.stdin.read()
"""
OWNER = f"""
import os, subprocess, sys
os.environ["{OWNER_VARIABLE}"] = str(os.getpid())
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(engine.pid, engine.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": REPOSITORY, **more}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_ends_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with owner:
        assert owner.stdout is not None
        pid, word = owner.stdout.readline().split()
        assert word == "loads"
        assert runs(int(pid))
        owner.kill()
    deadline = time.monotonic() + WAIT_S
    while runs(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_leaves_to_its_owner_what_a_terminal_interrupts() -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**{OWNER_VARIABLE: str(os.getpid())}),
    )
    with engine:
        assert engine.stdout is not None
        assert engine.stdout.readline().strip() == "loads"
        engine.send_signal(signal.SIGINT)
        engine.communicate("", timeout=WAIT_S)
    assert engine.returncode == 0


def test_it_ends_at_once_where_its_owner_has_ended_before() -> None:
    orphan = subprocess.run(
        [sys.executable, "-c", ENGINE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(**{OWNER_VARIABLE: "1"}),  # as if it had been another that started this
        timeout=WAIT_S,
        check=False,
    )
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGKILL, "")
