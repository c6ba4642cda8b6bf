"""The benchmark of presets runs, and its figures add up. How good they are is nobody's business here."""

import json
from pathlib import Path

import pytest
from quick_benchmark import quick_benchmark

from benchmarks.parts import Parts
from benchmarks.presets import measures
from benchmarks.presets.measures import EXACT, HANDS, ITERATION, RATIO, configured, read
from benchmarks.presets.plan import CONFIG, Plan
from benchmarks.presets.report import bars, report
from benchmarks.wire.figures import Figures
from rl_bridge.config import PRESETS, AlgorithmConfig, Config, load_config


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["dr_grpo", "gspo", "cispo", "ppo"])  # the others train in other tests
def test_a_quick_run_measures_a_preset(tmp_path: Path, name: str) -> None:
    found = quick_benchmark("presets", tmp_path, "--presets", name, timeout_s=280)
    rounds = {row["figure"]: row["rounds"] for row in found["figures"] if row["of"] == name}
    assert [len(rounds[figure]) for figure in (RATIO, EXACT)] == [2, 2]
    assert rounds[HANDS] == [32.0, 64.0]


@pytest.mark.parametrize("name", PRESETS)
def test_the_example_supplies_learning_rate_entropy_bonus_and_batch(name: str) -> None:
    example, config = load_config(CONFIG), configured(Plan(), name, 7)
    of_example = example.algorithm
    assert config.algorithm == AlgorithmConfig.model_validate(
        {
            "name": name,
            "entropy_coef": of_example.entropy_coef,
            "entropy_hold": of_example.entropy_hold,
            "entropy_final_factor": of_example.entropy_final_factor,
        }
    )
    assert config.trainer.learning_rate == example.trainer.learning_rate
    assert config.rollout == example.rollout
    assert config.trainer.updates_per_iteration >= 2
    own = {"iterations", "updates_per_iteration", "checkpoint_interval"}
    assert config.trainer.model_dump(exclude=own) == example.trainer.model_dump(exclude=own)
    # The bonus and the learning rate fall with the iterations: those have to be over in time.
    assert config.trainer.iterations <= example.trainer.iterations or name == "gspo"
    assert config.seed == 7


@pytest.mark.parametrize("plan", [Plan(), Plan().quick()])
def test_a_plan_comes_back_from_its_file(plan: Plan) -> None:
    assert Plan.of(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize(("iterations", "curve"), [(2, [-0.2, -0.05]), (7, [-0.2, -0.05, -0.04])])
def test_a_run_that_was_told_to_go_is_looked_at_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int, curve: list[float]
) -> None:
    async def train(config: Config, folder: Path, seconds: float) -> tuple[int, float]:
        write(folder, (1.0, 0.0, -0.2), (1.01, 0.1, -0.05))
        return iterations, -0.04

    monkeypatch.setattr(measures, "_train", train)
    plan, figures = Plan(presets=("dapo",)), Figures()
    measures.measure(plan, Parts(tmp_path, plan.parts(), figures, lambda _: None))
    assert figures.notes == []
    assert figures.values[EXACT, "dapo", "seed 0"] == curve
    assert figures.values[ITERATION, "dapo", "seed 0"][-1] == iterations


def write(folder: Path, *rows: tuple[float, float, float]) -> None:
    """A run's log, of rows of mean ratio, clipped share and exact return."""
    lines = [
        {
            "iteration": number,
            "loss/ratio_mean": ratio,
            "loss/clip_fraction_low": clipped,
            "loss/clip_fraction_high": 0.0,
            "probe/exact_return": exact,
            "time/elapsed_s": 100.0 * number,
            "rollout/trajectories": 8.0,
            "rollout/groups": 2.0,
            "rollout/refused_groups": 1.0,
        }
        for number, (ratio, clipped, exact) in enumerate(rows, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def logged(folder: Path, *rows: tuple[float, float, float]) -> Figures:
    write(folder, *rows)
    figures = Figures()
    read(folder, figures, "dapo", "seed 0")
    return figures


def test_what_was_refused_was_played_too(tmp_path: Path) -> None:
    # 8 hands in 2 groups, and a group that was dropped: 12 an iteration.
    figures = logged(tmp_path, (1.0, 0.0, -0.2), (1.01, 0.1, -0.05))
    assert figures.values[HANDS, "dapo", "seed 0"] == [12.0, 24.0]
    told = report(figures)
    assert "1: -0.200, 2: -0.050" in told
    assert "0.00% to 10.00%" in told


@pytest.mark.parametrize(
    ("rows", "unmet"),
    [
        ([(1.0, 0.0, -0.2), (0.99, 0.1, -0.05)], []),
        ([(1.0, 0.0, -0.05), (0.99, 0.1, -0.07)], ["exact return"]),
        ([(1.0, 0.1, -0.05), (1.0, 0.0, -0.05)], ["mean ratio, at most so far from 1"]),
        ([(0.99, 0.0, -0.05)], ["share clipped, the largest"]),
        ([(0.99, 1.0, -0.05)], ["share clipped, the smallest"]),
        ([(0.99, 0.1, -0.05)] * 7, ["seconds"]),
    ],
)
def test_what_must_show(tmp_path: Path, rows: list[tuple[float, float, float]], unmet: list[str]) -> None:
    held = bars(logged(tmp_path, *rows))
    assert [bar.what.split(": ")[1] for bar in held if not bar.met] == unmet
