"""The catalogue of attacks, played at every level that this machine has, and judged from outside."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from missing import missing

from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig, SandboxUnavailable

from .__main__ import CANNOT
from .catalogue import CATALOGUE, selected
from .play import play
from .sweep import PATTERNS, sweep
from .watch import percentile

LEVELS = (Isolation.NAMESPACES, Isolation.LSM)
WEAK = (Isolation.SECCOMP, Isolation.PROCESS)
TOGETHER = 12
BLOCKED_S = 2.0
"""A watchdog, no bar: how long the loop alone may be held up, while a process beside it is not."""

FELT = ("loop", "neighbour")
BAR_S = 0.1
CALM_S = 0.03
"""Beyond this without any attack, the machine has other things to do, and no bar says anything about the sandbox."""

REPOSITORY = Path(__file__).resolve().parents[3]


async def started(level: Isolation) -> Sandbox:
    sandbox = Sandbox(SandboxConfig(strongest=level, minimum=level))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        missing(f"the level {level} cannot be had here: {error}")
    return sandbox


@pytest_asyncio.fixture(params=LEVELS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    sandbox = await started(request.param)
    try:
        yield sandbox
    finally:
        await sandbox.close()


def test_the_catalogue_is_large_and_its_titles_are_unique() -> None:
    titles = [attack.title for attack in CATALOGUE]
    assert len(titles) == len(set(titles))
    for level in LEVELS:
        assert len(selected(level, slow=True)) >= 80
    categories = {attack.category for attack in CATALOGUE}
    assert len(categories) == 14


@pytest.mark.slow
async def test_attacks_are_contained(sandbox: Sandbox) -> None:
    attacks = selected(sandbox.isolation, slow=False)
    if sandbox.isolation is Isolation.NAMESPACES:
        # What limits alone contain is the same on every rung, and is played on the lower one.
        attacks = [attack for attack in attacks if Isolation.PROCESS not in attack.holds]
    report = await play(sandbox, attacks, together=TOGETHER)
    assert report.failures == []
    assert report.felt.loop
    assert max(report.felt.held, default=0.0) < BLOCKED_S


async def test_calls_by_number_change_nothing_outside(sandbox: Sandbox) -> None:
    swept = await sweep(sandbox, PATTERNS[::4])
    assert swept.breaches == []
    assert swept.calls == 601 * 3


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_all_attacks_one_by_one(sandbox: Sandbox) -> None:
    calm = await play(sandbox, [], thorough=True, at_least_s=3.0)
    report = await play(sandbox, selected(sandbox.isolation, slow=True), thorough=True)
    assert report.failures == []
    felt = {name: percentile(values, 0.99) for name, values in vars(report.felt).items() if name in FELT}
    if any(percentile(getattr(calm.felt, name), 0.99) > CALM_S for name in FELT):
        pytest.skip(f"this machine is too busy to say what others would feel: {felt}")
    assert max(felt.values()) < BAR_S, felt


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_calls_by_number_with_all_patterns(sandbox: Sandbox) -> None:
    swept = await sweep(sandbox)
    assert swept.breaches == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", WEAK)
async def test_what_weak_levels_contain(level: Isolation) -> None:
    sandbox = await started(level)
    try:
        report = await play(sandbox, selected(level, slow=True), together=TOGETHER, thorough=True)
    finally:
        await sandbox.close()
    assert report.failures == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user, which root alone can")
@pytest.mark.parametrize("level", LEVELS)
async def test_attacks_as_an_ordinary_user(level: Isolation) -> None:
    command = [sys.executable, "-m", "tests.sandbox.attacks.ordinary", "--level", level, "--json"]
    ran = await asyncio.to_thread(
        subprocess.run,
        [*command, "--together", str(TOGETHER)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if ran.returncode == CANNOT:
        missing(f"the level {level} cannot be had by an ordinary user here: {ran.stderr}")
    assert ran.stdout, ran.stderr
    told = json.loads(ran.stdout)
    assert told["uid"] != 0
    assert told["failures"] == []
    assert told["attacks"] >= 80
