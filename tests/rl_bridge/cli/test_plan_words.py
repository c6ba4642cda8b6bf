"""`ropewalk plan`: what it works out of which words, and how it ends."""

import json
from pathlib import Path

import pytest

from openenv_core.cli.main import run
from rl_bridge.cli.plan import COMMAND

GUIDE = str(Path(__file__).parents[1] / "config" / "guide.yaml")
BLACKJACK = str(Path(__file__).parents[3] / "examples" / "grpo_blackjack" / "config.yaml")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def plan(*words: str) -> int:
    return run(COMMAND, words)


def cells(told: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.splitlines() if "│" in line]


def test_guides_broadcast(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("broadcast", "--gb", "140", "--rollout_s", "10") == 0
    told = capsys.readouterr().out
    assert cells(told) == [["100", "11.2", "52.8%"], ["200", "5.6", "35.9%"], ["400", "2.8", "21.9%"]]
    assert "parameters" not in told


def test_guides_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--spot_gpus 48 --spot_price 1.75 --on_demand_gpus 16 --on_demand_price 2.42 --hours 24"
    assert plan("cost", *words.split()) == 0
    rows = {row[0]: row[1:] for row in cells(capsys.readouterr().out)}
    assert rows["together"] == ["64", "", "2,945.28"]
    assert rows["saved"][-1] == "20.8%"


def test_guides_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("memory", "--parameters", "70B", "--gpu_gb", "80") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1,120.0 GB" in told
    assert "16 bytes a parameter" in told
    assert "the guide's 14 leaves the 2 of the gradients out" in told
    assert "at least 14 GPUs of 80 GB" in told


def test_guides_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", GUIDE, "--parameters", "8B", "--gpu_gb", "60", "--rollout.max_length", "4096"]
    assert plan(*words) == 0
    rows = {row[0]: row[1:] for row in cells(capsys.readouterr().out)}
    assert rows["trainer"][:2] == ["1 x 2", "64.0 GB"]
    assert rows["trainer"][-1] == "does not fit"
    assert rows["policy"][:2] == ["14 x 1", "16.0 GB"]
    assert rows["policy"][-1] == "fits in the 85% that it may have"
    assert rows["100"] == ["1.28", "17.9"]  # 16 GB of bfloat16, to each of 14 from one host
    assert "saved" not in rows


def test_guides_file_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    prices = ["--hours", "10", "--spot_price", "1", "--on_demand_price", "2"]
    assert plan("--config", GUIDE, "--parameters", "8B", *prices, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["parameters"], told["trainer_bytes"]) == (8_000_000_000, 128_000_000_000)
    assert [role["role"] for role in told["roles"]] == ["trainer", "policy"]
    assert told["roles"][0]["process_bytes"] == 64_000_000_000
    # 14 on spot and 2 on demand, 10 hours: 140 + 40 instead of 320.
    assert (told["fleet"]["cost"], told["fleet"]["all_on_demand"]) == (180, 320)
    assert [broadcast["seconds"] for broadcast in told["broadcasts"]] == pytest.approx([1.28, 0.64, 0.32])
    assert all("fits" not in role for role in told["roles"])


def test_what_does_not_fit_is_in_the_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "--config", GUIDE, "--parameters", "8B", "--json"]
    for gpu_gb, fits in (("60", [False, True]), ("80", [True, True]), ("18", [False, False])):
        assert plan(*words, "--gpu_gb", gpu_gb) == 0
        roles = json.loads(capsys.readouterr().out)["roles"]
        assert [role["fits"] for role in roles] == fits
        assert [role["gpu_share"] for role in roles] == [1.0, 0.85]


def test_without_spot_gpus_their_price_is_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "cost",
        "--config",
        GUIDE,
        "rollout.spot_eligible=false",
        "--hours",
        "1",
        "--on_demand_price",
        "2",
    ]
    assert plan(*words) == 0
    assert {row[0]: row[-1] for row in cells(capsys.readouterr().out)}["together"] == "32.00"


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ([], 2, "expected something to plan"),
        (["--config", BLACKJACK], 2, f"expected model.path in {BLACKJACK}, which tells how large"),
        (["memory"], 2, "--config FILE or --parameters N"),
        (["broadcast"], 2, "--config FILE or --parameters N"),
        (["cost"], 2, "expected --hours, --spot_gpus, --on_demand_gpus, --on_demand_price"),
        (
            ["cost", "--config", GUIDE, "--hours", "1"],
            2,
            "expected --spot_price, --on_demand_price to work out",
        ),
        (["--config", GUIDE], 1, "config.json at '/models/Llama-3.1-8B-Instruct'"),
        (["--config", GUIDE, "model.path=null", "memory"], 2, "expected model.path or --parameters"),
        (["seed=1"], 2, "expected --config with 'seed=1'"),
        (["memroy"], 2, "one of memory, broadcast, cost"),
        (["--parameters", "lots"], 2, "--parameters: could not convert"),
        (["--gb", "1", "--gbps", "0"], 2, "expected --gbps as bandwidths above 0"),
        (["--gb", "1", "--gbps", "fast"], 2, "expected --gbps as bandwidths above 0"),
        (["--gb", "0"], 2, "expected --gb above 0"),
        (["--gb", "nan"], 2, "expected --gb above 0"),
        (["cost", "--spot_gpus", "-1"], 2, "expected --spot_gpus of at least 0"),
        (
            ["--config", GUIDE, "--parameters", "8B", "rollout.max_lenght=1"],
            2,
            "did you mean 'rollout.max_length'",
        ),
    ],
)
def test_words_that_say_too_little(
    words: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == status
    assert told in capsys.readouterr().err
