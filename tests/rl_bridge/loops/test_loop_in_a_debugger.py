"""The loop runs under pdb: it stops at breakpoints, and all its objects can be inspected."""

import sys
from pathlib import Path

import pytest
from module_run import finished

from rl_bridge.loops import grpo

pytestmark = pytest.mark.slow

LOOP = Path(grpo.__file__)
PROGRAM = """
import asyncio, sys
from pathlib import Path
from loop_stage import Stage

asyncio.run(Stage(Path(sys.argv[1]), iterations=2, timeout_s=60.0).train())
"""


def line_of(text: str) -> int:
    (number,) = [n for n, line in enumerate(LOOP.read_text().splitlines(), 1) if text in line]
    return number


def test_a_person_steps_through_an_iteration(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    commands = [
        f"break {LOOP}:{line_of('groups = await replay_buffer.sample')}",
        "continue",
        "p ('before', run.version)",
        # By breakpoints: `until` and `next` stop in `collect` too, which goes on while this one waits.
        f"tbreak {LOOP}:{line_of('metrics = await trainer.train_step')}",
        "continue",
        "p ('groups', [group.id for group in groups], len(trained))",
        f"tbreak {LOOP}:{line_of('run.version += 1')}",
        "continue",
        "p ('metrics', metrics)",
        "continue",
        "p ('again', run.version)",
        "clear 1",
        "continue",
    ]
    ran = finished(
        *(sys.executable, "-m", "pdb", str(program), str(tmp_path)),
        input="\n".join([*commands, "quit", ""]),
        env={"PATH": "", "PYTHONPATH": f"{Path(__file__).parent}:{LOOP.parents[2]}"},
        timeout_s=120,
    )
    for expected in (
        "('before', 0)",
        "('groups', [0, 1, 2, 3], 8)",
        "('metrics', {'loss/total': 0.0})",
        "('again', 1)",
    ):
        assert expected in ran.stdout, ran.stdout + ran.stderr
