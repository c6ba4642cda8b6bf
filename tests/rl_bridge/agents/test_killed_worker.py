"""A worker that is killed takes the programs of its agents with it."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sandbox_levels import sandbox_at
from serve_process import eventually

from openenv_core.sandbox import Isolation

MARK = "a program that sleeps"


async def require_namespaces() -> None:
    async with sandbox_at(Isolation.NAMESPACES):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("confined", [False, True])
def test_programs_end_with_their_worker(confined: bool, tmp_path: Path) -> None:
    if confined:
        asyncio.run(require_namespaces())
    script = str(Path(__file__).with_name("run_alone.py"))
    sleep = ("sh", "-c", f"echo started; sleep 1000 & sleep 1000; : {MARK}")
    worker = subprocess.Popen([sys.executable, script, str(confined), str(tmp_path), *sleep])
    try:
        output = tmp_path / "output.log"
        eventually(lambda: output.exists() and "started" in output.read_text())
        family = psutil.Process(worker.pid).children(recursive=True)
        assert any(MARK in " ".join(process.cmdline()) for process in family)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    eventually(lambda: not any(process.is_running() for process in family))
