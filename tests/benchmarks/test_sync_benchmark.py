"""The benchmark of whole synchronisations runs, and holds the bar against what it measured."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.sync.__main__ import main

    assert main(["--quick", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(row["figure"], row["of"]): row["rounds"] for row in found["figures"]}
    for state in ("an idle engine", "an engine at work"):
        whole, pause = rows["whole ms", state], rows["pause ms", state]
        parts = [rows[name, state] for name in ("put ms", "to tensors ms", "replacing the weights ms")]
        assert len(whole) == 2
        assert all(sum(each) < total for each, total in zip(zip(*parts, strict=True), whole, strict=True))
        assert all(0 < each < total for each, total in zip(pause, whole, strict=True))
    assert len(found["bars"]) == 2
    assert "at most 1.3" in capsys.readouterr().out
