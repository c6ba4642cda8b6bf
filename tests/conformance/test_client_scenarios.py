"""Every client scenario of the official conformance suites, against the client of envs/mcp_tools_env."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance_runs import (
    CLIENT,
    NEXT,
    RELEASED,
    Outcomes,
    Verdict,
    differences,
    find_differing,
    list_scenarios,
    run,
)

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PACKAGES = {"0.1.16": RELEASED, "next": NEXT}
MUST_PASS = {"initialize", "tools_call", "sse-retry"}
WAIT_TIMEOUT_S = 30.0
RUNS_ALONE = 3
"""At most. Some scenarios measure fractions of a second, and the machine may have other things to do."""


def expected_of(suite: str) -> dict[str, Verdict]:
    return {scenario: verdict for scenario, (verdict, _) in CLIENT[suite].items()}


def run_suite(command: str, folder: Path, suite: str) -> Outcomes:
    package, words = PACKAGES[suite], ("client", "--command", command, "--timeout", "60000")
    outcomes = run(package, folder, *words, "--suite", "all")
    # A suite starts all its scenarios at once, and some measure time: what came out otherwise is run alone.
    expected = expected_of(suite)
    for number, scenario in enumerate(find_differing(outcomes, expected)):
        for again in range(RUNS_ALONE):
            if scenario in find_differing(outcomes, expected):
                alone = folder / f"alone-{number}-{again}"
                outcomes |= run(package, alone, *words, "--scenario", scenario)
    return outcomes


@pytest.fixture(scope="module")
def command() -> Iterator[str]:
    """What starts the client under test."""
    warm = [sys.executable, str(HERE / "conformance_warm.py")]
    with tempfile.TemporaryDirectory(prefix="ropewalk-") as folder:  # the path of a socket may not be long
        path = str(Path(folder) / "client")
        environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        server = subprocess.Popen([*warm, path], stdout=subprocess.PIPE, text=True, env=environ)
        try:
            assert server.stdout.readline() == "ready\n"
            yield " ".join([sys.executable, "-I", "-S", warm[1], path])
        finally:
            server.kill()
            server.communicate(timeout=WAIT_TIMEOUT_S)


@pytest.mark.parametrize("suite", CLIENT)
def test_client_passes(command: str, suite: str, tmp_path: Path) -> None:
    outcomes = run_suite(command, tmp_path, suite)
    differing = differences(outcomes, expected_of(suite))
    assert not differing, "\n" + "\n".join(differing)
    assert set(outcomes) == list_scenarios(PACKAGES[suite], "--client")
    wanted = MUST_PASS | ({"request-metadata"} if suite == "next" else set())
    assert {outcomes[scenario].verdict for scenario in wanted} == {"passed"}


def test_readme_lists_the_scenarios_that_do_not_pass() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE))
    reasons = {name: why for suite in CLIENT.values() for name, (_, why) in suite.items()}
    assert rows == reasons
