"""`ropewalk plan`: its arguments, calculations and exit status."""

from pathlib import Path

import pytest

from openenv_core.cli.main import run
from rl_bridge.cli.plan import COMMAND

GUIDE = str(Path(__file__).parents[1] / "config" / "guide.yaml")
BLACKJACK = str(Path(__file__).parents[3] / "examples" / "grpo_blackjack" / "config.yaml")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def plan(*words: str) -> int:
    return run(COMMAND, words)


def cells(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]


def test_guides_broadcast(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("broadcast", "--gb", "140", "--rollout_s", "10") == 0
    output = capsys.readouterr().out
    assert cells(output) == [["100", "11.2", "52.8%"], ["200", "5.6", "35.9%"], ["400", "2.8", "21.9%"]]
    assert "parameters" not in output


def test_guides_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--spot_gpus 48 --spot_price 1.75 --on_demand_gpus 16 --on_demand_price 2.42 --hours 24"
    assert plan("cost", *words.split()) == 0
    rows = {row[0]: row[1:] for row in cells(capsys.readouterr().out)}
    assert rows["together"] == ["64", "", "2,945.28"]
    assert rows["saved"][-1] == "20.8%"


def test_guides_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", GUIDE, "--parameters", "8B", "--gpu_gb", "60", "--rollout.max_length", "4096"]
    assert plan(*words) == 0
    output = capsys.readouterr().out
    assert "monarch.roles.policy.replicas 14" in output  # and what else the GPUs decide
    rows = {row[0]: row[1:] for row in cells(output)}
    assert rows["trainer"][:2] == ["1 x 2", "64.0 GB"]
    assert rows["trainer"][-1] == "does not fit"
    assert rows["policy"][:2] == ["14 x 1", "16.0 GB"]
    assert rows["policy"][-1] == "fits in the 85% that it may have"
    assert rows["100"] == ["1.28", "17.9"]  # 16 GB of bfloat16, to each of 14 from one host
    assert "saved" not in rows


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "expected something to plan"),
        (["--config", BLACKJACK], 2, f"expected model.path in {BLACKJACK}, which tells how large"),
        (["cost"], 2, "expected --hours, --spot_gpus, --on_demand_gpus, --on_demand_price"),
        (["cost", "--config", GUIDE, "--hours", "1"], 2, "expected --spot_price, --on_demand_price to work"),
        (["--config", GUIDE], 1, "config.json at '/models/Llama-3.1-8B-Instruct'"),
        (["memroy"], 2, "one of memory, broadcast, cost"),
        (["--gb", "1", "--gbps", "0"], 2, "expected --gbps above 0"),
        (["--gb", "much"], 2, "expected --gb above 0, got much"),
        (["--config", GUIDE, "rollout.max_lenght=1"], 2, "did you mean 'rollout.max_length'"),
    ],
)
def test_incomplete_arguments_are_refused(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == status
    assert message in capsys.readouterr().err
