"""The benchmark of recipes runs, and its figures add up. How large they are is nobody's business here."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from quick_benchmark import ROOT, quick_benchmark

from benchmarks.parts import FILES, PLAN, Parts, kept_at
from benchmarks.presets import __main__ as presets_command
from benchmarks.recipes import __main__ as recipes_command
from benchmarks.recipes import measures
from benchmarks.recipes.measures import (
    IMITATED,
    IMITATED_TO_THE_END,
    REINFORCED,
    SECONDS,
    SEED,
    SETTLED,
    SOLVED,
    STEPS,
    TASKS,
    TAUGHT,
    for_longer,
)
from benchmarks.recipes.pictures import draw
from benchmarks.recipes.plan import Plan, recipe_file, reinforced
from benchmarks.recipes.report import bars, report
from benchmarks.wire.figures import Figures
from examples.sft.recipe import RecipeConfig
from rl_bridge.config import load_section
from rl_bridge.loops.sft import Look, SftResult
from rl_bridge.rollout import EvaluationResult
from rl_bridge.types import Ending

ALL = (TAUGHT, REINFORCED, IMITATED, IMITATED_TO_THE_END)


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_quick_run_measures_every_recipe(tmp_path: Path) -> None:
    found = quick_benchmark("recipes", tmp_path, timeout_s=500)
    played = {(row["load"], row["of"]): row["median"] for row in found["figures"] if row["figure"] == TASKS}
    assert played == {(name, who): 8 for name in ("tools", "code") for who in ALL}
    spent = {(row["load"], row["of"]): row["median"] for row in found["figures"] if row["figure"] == SECONDS}
    # The two ways to go on have the same time, and what is begun within it is brought to its end.
    assert all(
        spent[name, who] >= Plan().quick().seconds
        for name in ("tools", "code")
        for who in (REINFORCED, IMITATED)
    )
    # The best look may be the first, at what teaching began from; all else has learned something.
    best = (TAUGHT, IMITATED)
    assert all(row["median"] >= (row["of"] not in best) for row in found["figures"] if row["figure"] == STEPS)


def test_what_the_plan_says_is_left_is_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan()
    done: list[tuple[str, object]] = []

    def stand_in(name: str) -> object:
        def measure(*given: object) -> None:
            *_, folder, figures = given
            assert isinstance(figures, Figures)
            assert isinstance(folder, Path)
            done.append((name, folder.name))

        return measure

    for name in ("_teach", "_reinforce", "_imitate"):
        monkeypatch.setattr(measures, name, stand_in(name))
    figures = Figures()
    measures.measure(plan, Parts(tmp_path, plan.parts(), figures, lambda _: None))
    assert [folder for _, folder in done] == list(plan.parts())
    assert [name for name, _ in done] == ["_teach", *["_reinforce", "_imitate"] * 3] * 2
    assert figures.notes == []
    # Three hours of training, and what it takes besides.
    assert 3 * 3600 < sum(plan.parts().values()) < 4.5 * 3600


def test_without_a_taught_policy_there_is_nothing_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no traces")

    monkeypatch.setattr(measures, "_teach", fails)
    figures = Figures()
    measures.measure(Plan(), Parts(tmp_path, Plan().parts(), figures, lambda _: None))
    assert [note.partition(" (")[0] for note in figures.notes] == [
        "tools-taught: ValueError: no traces", "code-taught: ValueError: no traces",
    ]  # fmt: skip


def test_what_has_learned_is_drawn(tmp_path: Path) -> None:
    def learns(seed: int) -> None:
        run = tmp_path / reinforced("tools", seed)
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"time/elapsed_s": 6.0, "rollout/reward_mean": 0.5}\n')

    learns(1)
    assert list(draw(Plan(), tmp_path)) == []  # it was interrupted
    kept_at(tmp_path, reinforced("tools", 1)).touch()
    assert list(draw(Plan(), tmp_path)) == [tmp_path / "tools.png"]
    done = (tmp_path / "tools.png").read_bytes()
    assert len(done) > 1000
    learns(2)
    list(draw(Plan(), tmp_path))
    assert (tmp_path / "tools.png").read_bytes() == done
    kept_at(tmp_path, reinforced("tools", 2)).touch()
    list(draw(Plan(), tmp_path))
    assert (tmp_path / "tools.png").read_bytes() != done


def test_the_files_that_say_what_is_measured() -> None:
    plan = Plan()
    named = [
        file
        for name in plan.recipes
        for file in (
            recipe_file(name),
            load_section(ROOT / recipe_file(name), plan.teaching, RecipeConfig).world,
        )
    ]
    assert list(plan.files()) == named


@pytest.mark.parametrize(
    ("main", "words", "files"),
    [
        (
            recipes_command,
            ["--recipes", "code"],
            {"examples/sft/code.yaml", "examples/grpo_code/config.yaml"},
        ),
        (presets_command, ["--presets", "ppo"], {"examples/grpo_blackjack/config.yaml"}),
    ],
)
def test_the_commands_of_hours_note_what_they_measure(
    main: ModuleType, words: list[str], files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(main, "measure", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # ours is pytest's
    folder = tmp_path / "kept"
    assert main.main(["--folder", str(folder), *words]) == 0
    assert set(json.loads((folder / PLAN).read_text())[FILES]) == files
    assert main.main(["--resume", str(folder)]) == 0


@pytest.mark.parametrize("plan", [Plan(), Plan().quick()])
def test_a_plan_comes_back_from_its_file(plan: Plan) -> None:
    assert Plan.of(json.loads(json.dumps(plan.as_json()))) == plan


def test_further_teaching_has_all_the_time_and_both_cores() -> None:
    recipe = load_section(ROOT / "examples/sft/tools.yaml", [], RecipeConfig)
    longer = for_longer(recipe, 7, 900.0)
    assert longer.sft.max_seconds == 900.0
    assert (longer.sft.patience, longer.sft.seed, longer.sft.num_threads) == (None, 7, 2)
    assert longer.sft.max_updates > 100_000
    # Adam begins anew, and so does its warm-up.
    unchanged = {"learning_rate", "warmup_updates", "batch_size", "weight_decay", "evaluate_every"}
    assert longer.sft.model_dump(include=unchanged) == recipe.sft.model_dump(include=unchanged)


def of(taught: int, *reinforced: int, tasks: int = 1000, settled: float | None = 1.0) -> Figures:
    figures = Figures()
    for who, counts in ((TAUGHT, (taught,)), (REINFORCED, reinforced), (IMITATED, (taught,))):
        for seed, solved in enumerate(counts):
            for figure, value in ((SEED, seed), (SOLVED, solved), (TASKS, tasks), (STEPS, 9), (SECONDS, 900)):
                figures.add(figure, who, "tools", value)
    if settled is not None:
        figures.add(SETTLED, TAUGHT, "tools", settled)
    return figures


def test_ten_points_more_with_the_intervals_apart_meet_the_bars() -> None:
    assert all(bar.met for bar in bars(of(300, 420, 500, 600)))


@pytest.mark.parametrize(
    ("solved", "tasks", "unmet"),
    [
        (390, 1000, {"tools, seed 1: more solved"}),  # 9 points; the intervals are apart
        (190, 500, {"tools, seed 1: more solved", "tools, seed 1: between the intervals"}),
        (340, 499, {"tools: held-out tasks"}),
    ],
)
def test_one_run_that_misses_is_enough(solved: int, tasks: int, unmet: set[str]) -> None:
    taught = round(0.3 * tasks)
    held = bars(of(taught, 2 * taught, solved, tasks=tasks))
    assert {bar.what for bar in held if not bar.met} == unmet


def test_a_run_whose_tasks_were_all_lost_is_no_success() -> None:
    figures = of(300, 600)
    for figure, value in ((SEED, 1), (SOLVED, 0), (TASKS, 0), (STEPS, 9), (SECONDS, 900)):
        figures.add(figure, REINFORCED, "tools", value)
    assert {bar.what for bar in bars(figures) if not bar.met} == {
        "tools: held-out tasks", "tools, seed 1: more solved", "tools, seed 1: between the intervals",
    }  # fmt: skip
    assert "0.0% to 100.0%" in report(figures)


def test_every_run_has_a_row() -> None:
    told = report(of(300, 420, 500))
    assert "30.0%" in told
    assert "42.0%" in told
    assert "27.2% to 32.9%" in told


@pytest.mark.parametrize(
    ("settled", "unmet", "told"),
    [
        (1.0, set(), "stopped falling"),
        (0.0, {"tools: validation loss stopped falling"}, "was falling still"),
        (None, set(), None),  # a part from before that was noted
    ],
)
def test_a_policy_that_could_be_taught_more_is_told(
    settled: float | None, unmet: set[str], told: str | None
) -> None:
    figures = of(300, 420, settled=settled)
    assert {bar.what for bar in bars(figures) if not bar.met} == unmet
    taught, reinforced = (
        next(line for line in report(figures).splitlines() if f"| {who} " in line)
        for who in (TAUGHT, REINFORCED)
    )
    for words in ("stopped falling", "was falling still"):
        assert (words in taught) == (words == told)
        assert words not in reinforced


def test_whether_it_settled_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Look(update=9, loss=1.0, validation_loss=2.0, seconds=3.0)
    played = EvaluationResult(
        rewards=[1.0, 0.0], endings=[Ending.COMPLETED] * 2, dropped=0, train_seconds=0.0
    )
    for settled in (True, False):
        came_out = SftResult(looks=[look], kept=look, settled=settled)
        monkeypatch.setattr(measures, "teach", lambda *_, came_out=came_out: came_out)
        monkeypatch.setattr(measures, "_play", lambda *_: played)
        figures = Figures()
        recipe = load_section(ROOT / recipe_file("tools"), [], RecipeConfig)
        measures._teach(Plan(), recipe, "tools", tmp_path, figures)
        assert figures.values[SETTLED, TAUGHT, "tools"] == [float(settled)]
        assert figures.values[STEPS, TAUGHT, "tools"] == [9]


def test_it_says_that_what_is_under_way_is_finished() -> None:
    assert "seconds may be a bit above" in report(of(300, 420))
