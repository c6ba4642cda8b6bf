"""Runs the official conformance suites, reads the outcome of each scenario, and lists those expected not to pass."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from module_run import finished
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
    done = finished(
        *script(package), *words, "--output-dir", str(folder), env=environ(), timeout_s=DEADLINE_S
    )
    outcomes = {}
    for checks in sorted(folder.glob("**/checks.json")):
        scenario = _FOLDER.fullmatch(str(checks.parent.relative_to(folder)))
        assert scenario, f"expected the folder of a scenario, got {checks.parent}"
        outcomes[scenario[1]] = _outcome(json.loads(checks.read_text(encoding="utf-8")))
    assert outcomes, f"expected checks, got none:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return outcomes


def list_scenarios(package: str, *options: str) -> set[str]:
    """Return the scenarios that a suite says it has."""
    done = subprocess.run(
        [*script(package), "list", *options], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    names = set(re.findall(r"^  - (\S+)", done.stdout, re.MULTILINE))
    assert names, done.stdout
    return names


def find_differing(outcomes: Outcomes, expected: Mapping[str, Verdict]) -> list[str]:
    """Return the scenarios whose outcome differs from the expected one; the default is to pass."""
    return [
        scenario
        for scenario, outcome in outcomes.items()
        if outcome.verdict != expected.get(scenario, "passed")
    ]


def differences(outcomes: Outcomes, expected: Mapping[str, Verdict]) -> list[str]:
    """Describe each outcome that differs from the expected one; the default is to pass."""
    return [
        f"{scenario}: expected {expected.get(scenario, 'passed')}, got {outcomes[scenario].verdict}\n"
        f"{outcomes[scenario].complaints}"
        for scenario in find_differing(outcomes, expected)
    ] + [f"{scenario}: expected to be run, it was not" for scenario in expected if scenario not in outcomes]


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


# What does not pass, and why. What is not here has to pass; what is here and passes fails.

Expected: TypeAlias = Mapping[str, tuple[Verdict, str]]

_TASKS = "the extension io.modelcontextprotocol/tasks (SEP-2663), which the SDK does not support"
_TASK_PARTS = """
    lifecycle capability-negotiation wire-fields request-state-removal mrtr-input request-headers
    dispatch-and-envelope required-task-error mrtr-composition
"""
_SKILLS = "the extension for skills (SEP-2640), which the SDK does not support"
_OLD_POLLING = "this version names 2025-03-26 in its call, and priming events began with 2025-11-25"

_ASKED = "elicitation has no user to ask: the caller is a policy, which gets an error"
_ACCOUNTS = (
    "OAuth requires a person who signs in with a browser; an environment runs unattended, with its tokens in the "
    "`headers` of its `mcpServers`"
)

_MACHINES = (
    "an extension, OAuth between machines; the SDK has part of it, but `mcpServers` has no keys for it: put a token "
    "in `headers` instead"
)

SERVER: Final[Mapping[str, Expected]] = {
    "0.1.16": {"server-sse-polling": ("warned", _OLD_POLLING)},
    "2025-03-26": {},
    "2025-06-18": {},
    "2025-11-25": {},
    "2026-07-28": {
        **{f"tasks-{part}": ("failed", _TASKS) for part in _TASK_PARTS.split()},
        "tasks-status-notifications": ("skipped", f"{_TASKS}; the suite itself looks at nothing"),
    },
    "extensions": {
        "sep-2640-skills-directory": ("skipped", _SKILLS),
        "sep-2640-skills-enumeration": ("skipped", _SKILLS),
        "sep-2640-skills-manifest": ("skipped", _SKILLS),
    },
}

# Of the client; the suites have these in common.
_BOTH_ACCOUNTS = """
    2025-03-26-oauth-endpoint-fallback 2025-03-26-oauth-metadata-backcompat basic-cimd
    metadata-default metadata-var1 metadata-var2 metadata-var3 offline-access-not-supported
    offline-access-scope pre-registration scope-from-scopes-supported scope-from-www-authenticate
    scope-omitted-when-undefined scope-retry-limit scope-step-up token-endpoint-auth-basic
    token-endpoint-auth-none token-endpoint-auth-post
"""
_NEXT_ACCOUNTS = """
    authorization-server-migration dpop dpop-nonce iss-normalized iss-not-advertised iss-supported
    iss-supported-missing iss-unexpected iss-wrong-issuer metadata-issuer-mismatch resource-mismatch
"""
_BOTH: Final[Expected] = {
    **{f"auth/{part}": ("failed", _ACCOUNTS) for part in _BOTH_ACCOUNTS.split()},
    "auth/client-credentials-basic": ("failed", _MACHINES),
    "auth/client-credentials-jwt": ("failed", _MACHINES),
    "elicitation-sep1034-client-defaults": ("failed", _ASKED),
}

CLIENT: Final[Mapping[str, Expected]] = {
    "0.1.16": {**_BOTH, "auth/cross-app-access-complete-flow": ("failed", _MACHINES)},
    "next": {
        **_BOTH,
        **{f"auth/{part}": ("failed", _ACCOUNTS) for part in _NEXT_ACCOUNTS.split()},
        "auth/enterprise-managed-authorization": ("failed", _MACHINES),
        "auth/wif-jwt-bearer": ("failed", _MACHINES),
        "sep-2322-client-request-state": ("failed", _ASKED),
        "sep-2640-client-no-prefetch": ("skipped", _SKILLS),
        "sep-2640-client-verify-digest": ("skipped", _SKILLS),
        "sep-2640-client-verify-frontmatter": ("skipped", _SKILLS),
        "sep-2640-client-verify-size": ("skipped", _SKILLS),
    },
}
