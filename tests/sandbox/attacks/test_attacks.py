"""The catalogue of attacks, played at every level that this machine has, and judged from outside."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from docker_engine import engine, hostile_image
from interpreter_image import interpreter_image
from missing import missing

from openenv_core.sandbox import Isolation, Sandbox

from .__main__ import CANNOT
from .catalogue import CATALOGUE, CATEGORIES, selected
from .model import LIMITS, STRONG, attacks_held_at
from .play import play
from .sweep import LAST, PATTERNS, sweep

__all__ = ["engine", "hostile_image", "interpreter_image"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEVELS = (Isolation.NAMESPACES, Isolation.LSM)
WEAK = (Isolation.SECCOMP, Isolation.PROCESS)
TOGETHER = 12
LATENCY_BAR_S = 0.1
CALM_LIMIT_S = 0.03
"""Beyond this without any attack, the machine has other things to do, and no bar says anything about the sandbox."""

HERE = Path(__file__).resolve().parent
# What dockerfiles/code_interpreter/run takes away, too.
HARDENED = (
    *("--init", "--user", "10001:10001", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--read-only", "--tmpfs", "/tmp:rw,nosuid,nodev,noexec,size=256m,mode=1777"),
    *("--memory", "2g", "--memory-swap", "2g", "--pids-limit", "1024"),
)


async def test_catalogue_is_large_and_has_unique_titles() -> None:
    titles = [attack.title for attack in CATALOGUE]
    assert len(titles) == len(set(titles)) >= 193
    assert len({attack.category for attack in CATALOGUE}) == len(CATEGORIES) == 14
    for level in LEVELS:
        assert len(selected(level, slow=True)) >= 180


@pytest.mark.slow
async def test_quick_attacks_are_contained(sandbox: Sandbox) -> None:
    attacks = selected(sandbox.isolation, slow=False)
    if sandbox.isolation is Isolation.NAMESPACES:
        # What limits alone contain is the same on every rung, and is played on the lower one.
        attacks = [attack for attack in attacks if Isolation.PROCESS not in attack.holds]
    report = await play(sandbox, attacks, together=TOGETHER)
    assert report.failures == []
    assert len(report.outcomes) == len(attacks) > 80


FORKING = """
    import resource
    must_fail("a socket", socket.socket)
    for pid in (HOST["supervisor"], HOST["zygote"], HOST["victim"]):
        must_fail("a signal", os.kill, pid, 0)
        must_fail("limits of others", resource.prlimit, pid, resource.RLIMIT_NOFILE)
    must_fail("memory without a file", os.memfd_create, "x")
    must_fail("a mount", lambda: syscall("mount", b"x", b"/", b"tmpfs", 0, None))
    must_fail("a session of its own", os.setsid)
    must_fail("a file outside", open, HOST["writable"], "a")
    if (process := os.fork()) == 0:
        os._exit(7)
    if os.waitpid(process, 0)[1] != 7 << 8:
        breach("no fork")
    """


async def test_sessions_that_may_fork_gain_nothing_else(sandbox: Sandbox) -> None:
    attack = attacks_held_at(STRONG)
    programs = "import subprocess\nsubprocess.run([sys.executable, '-I', '-S', '-c', ''], check=True)"
    attacks = [
        attack("subprocess", "", limits=replace(LIMITS, allow_subprocess=True))(FORKING, programs),
        attack("snapshot", "", snapshot=True)(FORKING, f"must_fail('a program', exec, {programs!r})"),
    ]
    assert (await play(sandbox, attacks)).failures == []


@pytest.mark.parametrize(
    "patterns",
    [
        pytest.param(PATTERNS[::4], marks=pytest.mark.slow, id="some"),
        pytest.param(PATTERNS, marks=[pytest.mark.soak, pytest.mark.timeout(600)], id="all"),
    ],
)
async def test_system_calls_by_number_change_nothing_outside(
    sandbox: Sandbox, patterns: tuple[str, ...]
) -> None:
    swept = await sweep(sandbox, patterns)
    assert swept.breaches == []
    assert swept.calls == (LAST + 1) * len(patterns)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_all_attacks_slow_no_other_session(sandbox: Sandbox) -> None:
    calm = await play(sandbox, [], thorough=True, at_least_s=3.0)
    report = await play(sandbox, selected(sandbox.isolation, slow=True), thorough=True)
    assert report.failures == []
    if max(calm.felt.p99_s.values()) > CALM_LIMIT_S:
        pytest.skip(f"this machine is too busy to say what others would feel: {report.felt.p99_s}")
    assert max(report.felt.p99_s.values()) < LATENCY_BAR_S, report.felt.p99_s


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sandbox", WEAK, indirect=True)
async def test_weak_levels_contain_what_they_promise(sandbox: Sandbox) -> None:
    attacks = selected(sandbox.isolation, slow=True)
    report = await play(sandbox, attacks, together=TOGETHER, thorough=True)
    assert report.failures == []


async def catalogue_by(*command: str, level: Isolation, user: int | None, together: int) -> None:
    """Play the whole catalogue in a separate process; nothing may get through."""
    arguments = ("--level", str(level), "--together", str(together), "--json")
    completed = await asyncio.to_thread(
        subprocess.run, [*command, *arguments], cwd=HERE.parents[2], capture_output=True, text=True
    )
    if completed.returncode == CANNOT:
        missing(f"the level {level} cannot be had by user {user} here: {completed.stderr}")
    assert completed.stdout, completed.stderr
    report = json.loads(completed.stdout)
    assert report["isolation"] == str(level)
    assert report["uid"] != 0
    assert user in (None, report["uid"])
    assert report["failures"] == []
    assert report["attacks"] >= 180


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user, which root alone can")
@pytest.mark.parametrize("level", LEVELS)
async def test_attacks_as_an_unprivileged_user_are_contained(level: Isolation) -> None:
    program = (sys.executable, "-m", "tests.sandbox.attacks.ordinary")
    await catalogue_by(*program, level=level, user=None, together=TOGETHER)


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_attacks_in_a_hardened_container_are_contained(interpreter_image: str) -> None:
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("needs the docker command line")
    files = ("--volume", f"{HERE}:/catalogue/tests/sandbox/attacks:ro", "--workdir", "/catalogue")
    program = ("--entrypoint", "python3", interpreter_image, "-B", "-m", "tests.sandbox.attacks")
    command = (docker, "run", "--rm", *HARDENED, *files, *program)
    await catalogue_by(*command, level=Isolation.LSM, user=10001, together=4)
