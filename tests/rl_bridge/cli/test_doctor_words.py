"""`ropewalk doctor`: its arguments and exit status."""

import argparse
import json
from pathlib import Path

import pytest

from openenv_core.cli.main import run
from rl_bridge.cli.doctor import COMMAND, _make_rendezvous
from rl_bridge.config import load_config
from rl_bridge.doctor import collectives, host
from rl_bridge.doctor.collectives import Rendezvous
from rl_bridge.doctor.host import Finding, Severity

GUIDE = str(Path(__file__).parents[1] / "config" / "guide.yaml")


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "count_usable_gpus", lambda: 0)  # it takes seconds to import


def rendezvous_of(*argv: str, gpus: int = 0) -> Rendezvous:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    arguments = parser.parse_intermixed_args(argv)
    config = None if arguments.config is None else load_config(arguments.config, arguments.overrides)
    return _make_rendezvous(arguments, config, gpus=gpus)


def shape_of(found: Rendezvous) -> tuple[int, int, int, bool]:
    return found.num_nodes, found.node_rank, found.per_host, found.on_gpus


def test_processes_are_those_of_gpus_options_or_a_configuration() -> None:
    assert shape_of(rendezvous_of(gpus=4)) == (1, 0, 4, True)
    assert shape_of(rendezvous_of("--procs", "3", gpus=4)) == (1, 0, 3, True)
    assert shape_of(rendezvous_of("--procs", "8", gpus=4)) == (1, 0, 8, False)
    found = rendezvous_of("--config", GUIDE, "--node_rank", "7")
    assert (shape_of(found), found.address) == ((8, 7, 2, False), "10.0.0.1:29500")
    assert rendezvous_of("--config", GUIDE, "monarch.num_nodes=9", "--node_rank", "8").num_nodes == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--node_rank", "0"], "expected --addr HOST:PORT of host 0"),
        (["--num_nodes", "2", "--addr", "h:1"], "expected --node_rank with several hosts, from 0 to 1"),
        (["--num_nodes", "2", "--addr", "h:1", "--node_rank", "2"], "from 0 to 1, got 2"),
        (["--procs", "0"], "expected --procs of at least 1, got 0"),
        (["seed=1"], "expected --config with 'seed=1'"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(COMMAND, arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("level", "status"), [(Severity.GOOD, 0), (Severity.ODD, 0), (Severity.BAD, 1)])
def test_findings_decide_the_exit_status(
    level: Severity, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "check_packages", lambda: [Finding("a", "b", level)])
    monkeypatch.setattr(host, "check_imports", lambda: [])
    expected: list[int] = []
    monkeypatch.setattr(
        host, "check_machine", lambda *, gpus, expected_gpus: expected.append(expected_gpus) or []
    )
    monkeypatch.setattr(collectives, "check_collectives", lambda found: [Finding("c", str(found.world))])
    assert run(COMMAND, []) == run(COMMAND, ["--json"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [level.value, "a:", "b"]
    assert json.loads(lines[-1]) == {"what": "c", "told": "2", "level": "good", "metrics": {}}
    # The GPUs of a file are those of its hosts, one of which this is if it has a rank.
    assert (
        run(COMMAND, ["--config", GUIDE]) == run(COMMAND, ["--config", GUIDE, "--node_rank", "0"]) == status
    )
    assert expected == [0, 0, 0, 8]
