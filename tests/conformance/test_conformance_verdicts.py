"""What the harness makes of a suite's checks."""

import json
from pathlib import Path

import pytest
from conformance_runs import Outcome, differences, read

PASSED, FAILED = Outcome("passed", ""), Outcome("failed", "why")


def test_only_what_is_as_expected_is_no_difference() -> None:
    outcomes = {"good": PASSED, "bad": FAILED}
    assert differences(outcomes, {"bad": "failed"}) == []
    assert [line.split(":")[0] for line in differences(outcomes, {})] == ["bad"]
    assert [line.split(":")[0] for line in differences(outcomes, {"bad": "failed", "good": "failed"})] == [
        "good"
    ]
    assert differences(outcomes, {"bad": "failed", "gone": "failed"}) == [
        "gone: expected to be run, it was not"
    ]


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        (["SUCCESS", "INFO", "SKIPPED"], "passed"),
        (["SUCCESS", "WARNING"], "warned"),
        (["SUCCESS", "WARNING", "FAILURE"], "failed"),
        (["SKIPPED", "INFO"], "skipped"),
        ([], "skipped"),
    ],
)
def test_verdict_is_that_of_the_worst_check(tmp_path: Path, statuses: list[str], verdict: str) -> None:
    folder = tmp_path / "auth" / "basic-2026-01-02T03-04-05-678Z"
    folder.mkdir(parents=True)
    schema = {"id": "wire-schema-valid", "status": "SUCCESS"}  # by itself it is no scenario's success
    checks = [schema, *({"id": f"check-{status}", "status": status} for status in statuses)]
    (folder / "checks.json").write_text(json.dumps(checks), encoding="utf-8")
    assert {name: outcome.verdict for name, outcome in read(tmp_path).items()} == {"auth/basic": verdict}
