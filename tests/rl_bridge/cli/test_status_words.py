"""`ropewalk status`: choosing the run, output and exit status."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from openenv_core.cli.main import run
from rl_bridge.cli.status import COMMAND
from rl_bridge.metrics.status import ADDRESS_FILE, StatusSnapshot
from tests.rl_bridge.metrics.status_fixtures import served, snapshot


def status(*arguments: str) -> int:
    return run(COMMAND, arguments)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


def test_mesh_replicas_versions_and_leases_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with served(snapshot) as address:
        assert status("--addr", address) == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    head = [row[0] for row in rows]
    assert "seven on head (pid 4711), 1:02:05 under way, in runs/seven" in head
    assert "version 12 of 150, generators serve version 11; staleness at most 1" in head
    assert "groups: 2 leased, 3 finished, 96 trained, 1 dropped; leases: rollout-0 1, rollout-1 1" in head
    cells = [row[1:-1] for row in rows]
    assert ["policy", "0", "serving", "one", "31 32", "7", "0", "11"] in cells
    assert ["policy", "1", "restarting [back-off]", "-", "-", "0", "2", "-"] in cells
    assert cells.index(["99", "rollout-1", "2", "1:01"]) + 1 == cells.index(["104", "rollout-0", "1", "0:02"])
    assert ["trainer-0", "50.0%", "49.0%", "1.0%", "50.0%", "train 50.0%", "batches 49.0%"] in cells
    assert any(row[1:] == ["policy", "1", "lost [signal 9]"] for row in cells)


def test_names_from_elsewhere_are_text_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Spans have the names that tasks give them, and whoever answers at the address may say anything."""
    name = "[/red] \x1b]0;title\x07[bold]"
    totals = next(iter(snapshot().spans.values()))
    totals = replace(totals, seconds={(name, None): 1.0, ("rest", name): 1.0})
    odd = snapshot().model_copy(update={"name": name, "folder": name, "spans": {name: totals}})
    with served(lambda: odd) as address:
        assert status("--addr", address) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert output.count("[/red] ?]0;title?[bold]") >= 3, output


def test_newest_run_that_lives_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {name: tmp_path / "runs" / name for name in ("old", "new", "killed", "odd")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    with served(lambda: snapshot(name="old"), folders["old"]) as address:
        os.utime(folders["old"] / ADDRESS_FILE, (1, 1))
        with served(lambda: snapshot(name="new"), folders["new"]):
            os.utime(folders["new"] / ADDRESS_FILE, (2, 2))
            (folders["killed"] / ADDRESS_FILE).write_text('{"address": "127.0.0.1:1", "began": 1}')
            (folders["odd"] / ADDRESS_FILE).write_text("not json")
            assert status("--json") == 0
            assert json.loads(capsys.readouterr().out)["name"] == "new"
            assert status("--json", "--run", str(folders["old"])) == 0
            assert json.loads(capsys.readouterr().out)["name"] == "old"
        assert not (folders["new"] / ADDRESS_FILE).exists()  # it has ended
        assert status("--json") == 0
        assert json.loads(capsys.readouterr().out)["name"] == "old"
    assert status("--addr", address) == 1
    assert "is the run under way" in capsys.readouterr().err


def test_killed_run_is_not_taken_for_the_one_that_has_its_address_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "runs" / "killed"
    killed.mkdir(parents=True)
    with served(snapshot) as address:
        (killed / ADDRESS_FILE).write_text(json.dumps({"address": address, "began": 1.0}))
        assert status("--run", str(killed)) == status() == 1
    captured = capsys.readouterr()
    assert f"at {address}, where 'seven' is now; it was killed" in captured.err
    assert captured.out == ""


def test_hosts_that_are_missing_show_in_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with served(snapshot) as address:
        assert status("--addr", address, "--num_nodes", "2") == 0
        assert capsys.readouterr().err == ""
        assert status("--addr", address, "--num_nodes", "3") == 1
    assert "expected 3 hosts, 2 are alive: head, one" in capsys.readouterr().err


def test_watching_ends_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    looks = 0

    def take() -> StatusSnapshot:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise RuntimeError
        return snapshot(version=looks)

    with served(take) as address:
        assert status("--addr", address, "--watch", "0.25") == 0
    captured = capsys.readouterr()
    assert f"the run at {address} no longer answers" in captured.err
    assert "version 1 of 150" in captured.out  # without a terminal each refresh is printed
    assert "version 2 of 150" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--addr", "nowhere"), "expected an address as HOST:PORT"),
        (("--watch", "nan"), "expected --watch above 0"),
        (("--num_nodes", "0"), "expected --num_nodes of at least 1"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*arguments) == 2
    assert message in capsys.readouterr().err
