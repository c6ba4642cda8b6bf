"""The process that runs checks, when whoever asked for them has gone."""

import subprocess
import sys
from pathlib import Path

NEVER_LETS_GO = """\
import signal, sys
from openenv_core.checker import worker

signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker.ORPHANED_S = 0.1
worker._watch(sys.argv[1])
"""


def test_temporary_files_are_removed_where_cleaning_up_does_not_end(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    (temporary / "of a check").mkdir(parents=True)
    words = [sys.executable, "-c", NEVER_LETS_GO, str(temporary)]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, timeout=60).returncode == 1
    assert not temporary.exists()
