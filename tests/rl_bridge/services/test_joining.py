"""Hosts that join a run, leave it after a notice, or are lost: processes on loopback."""

import sys
from pathlib import Path

import pytest
from module_run import finished

HERE = Path(__file__).parent


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_hosts_join_leave_and_are_lost(tmp_path: Path) -> None:
    # In a process of its own: the transport between hosts is chosen before the first use of Monarch.
    ran = finished(sys.executable, str(HERE / "joining_controller.py"), str(tmp_path), timeout_s=280)
    assert ran.returncode == 0, ran.stderr
