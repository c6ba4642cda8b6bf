"""Runs the official conformance suites, and reads what became of each scenario."""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from node_tools import environ, script

RELEASED = "@modelcontextprotocol/conformance"
NEXT = "conformance-next"
DEADLINE_S = 100.0

Verdict: TypeAlias = Literal["passed", "warned", "failed", "skipped"]
# The folder of one scenario's checks: what was tested, the scenario, when.
_FOLDER = re.compile(r"(?:server-)?(.+)-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-\d{3}Z")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a scenario.

    Attributes:
        verdict: passed: something succeeded, and nothing failed or was warned of; skipped: nothing was looked at.
        complaints: The checks that failed or were warned of, one a line.
    """

    verdict: Verdict
    complaints: str


Outcomes: TypeAlias = Mapping[str, Outcome]


def run(package: str, folder: Path, *words: str) -> dict[str, Outcome]:
    """Run part of a suite with its checks written to a folder; return the outcomes by scenario."""
    done = subprocess.run(
        [*script(package), *words, "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=environ(),
    )
    outcomes = read(folder)
    assert outcomes, f"expected checks, got none:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return outcomes


def read(folder: Path) -> dict[str, Outcome]:
    """Return what a run has written to a folder."""
    return {
        _scenario(checks.parent.relative_to(folder)): _outcome(json.loads(checks.read_text(encoding="utf-8")))
        for checks in sorted(folder.glob("**/checks.json"))
    }


def listed(package: str, *words: str) -> set[str]:
    """Return the scenarios that a suite says it has."""
    done = subprocess.run(
        [*script(package), "list", *words], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    names = set(re.findall(r"^  - (\S+)", done.stdout, re.MULTILINE))
    assert names, done.stdout
    return names


def unlike(outcomes: Outcomes, expected: Mapping[str, Verdict]) -> list[str]:
    """Return the scenarios that came out otherwise than expected; what nothing is said of is expected to pass."""
    return [
        scenario
        for scenario, outcome in outcomes.items()
        if outcome.verdict != expected.get(scenario, "passed")
    ]


def differences(outcomes: Outcomes, expected: Mapping[str, Verdict]) -> list[str]:
    """Return where outcomes are not as expected, in words; a scenario that nothing is said of is expected to pass."""
    return [
        f"{scenario}: expected {expected.get(scenario, 'passed')}, got {outcomes[scenario].verdict}\n"
        f"{outcomes[scenario].complaints}"
        for scenario in unlike(outcomes, expected)
    ] + [f"{scenario}: expected to be run, it was not" for scenario in _absent(expected, outcomes)]


def _absent(wanted: Iterable[str], outcomes: Outcomes) -> list[str]:
    return [scenario for scenario in wanted if scenario not in outcomes]


def _scenario(folder: Path) -> str:
    found = _FOLDER.fullmatch(str(folder))
    assert found is not None, f"expected the folder of a scenario, got {folder}"
    return found[1]


def _outcome(checks: list[Mapping[str, str]]) -> Outcome:
    statuses = {check["status"] for check in checks}
    # Each scenario has its messages checked against the schema too, one that looks at nothing else as well.
    own = {check["status"] for check in checks if not check["id"].startswith("wire-schema-")}
    complaints = "\n".join(
        f"    {check['status']} {check['id']}: {check.get('errorMessage', '')}"
        for check in checks
        if check["status"] in ("FAILURE", "WARNING")
    )
    if "FAILURE" in statuses:
        return Outcome("failed", complaints)
    if "WARNING" in statuses:
        return Outcome("warned", complaints)
    return Outcome("passed" if "SUCCESS" in own else "skipped", complaints)
