"""Harbor's own trials of our tasks: its oracle and its idle agent get the same rewards as here."""

import json
from pathlib import Path

import pytest
from docker_engine import engine
from harbor_tasks import NOTHING, SOLVED, TASKS
from missing import missing
from module_run import finished
from released import DRIVERS, ROOT, environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

__all__ = ["engine"]

HARBOR = ROOT / ".venvs" / "harbor-3.12" / "bin" / "python"
WAIT_TIMEOUT_S = 500


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "names",
    [
        ("count-lines", "sort-table"),
        pytest.param(("fix-median", "make-tool", "report"), marks=pytest.mark.soak),
    ],
)
def test_verdicts_match_those_of_harbor(names: tuple[str, ...], tmp_path: Path) -> None:
    if not HARBOR.is_file():
        missing("needs Harbor on Python 3.12: PROFILE=harbor scripts/newer-python --version")
    command = [HARBOR, DRIVERS / "harbor_trials.py", tmp_path, *(TASKS / name for name in names)]
    done = finished(*command, env=environment(), cwd=tmp_path, timeout_s=WAIT_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told) == list(names)
    for name, found in told.items():
        assert (found["valid"], found["faults"]) == (True, []), name
        assert found["oracle"] == {"rewards": SOLVED[name], "failure": None}, name
        assert found["nop"] == {"rewards": NOTHING[name], "failure": None}, name
