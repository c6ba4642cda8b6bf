"""The recipe: its files, its traces, its report; and the whole of it at toy size."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.sft import __main__ as sft
from examples.sft.recipe import VALIDATION_SEEDS, VOCABULARY_SEEDS, RecipeConfig, record, solver_of, task_of
from examples.sft.report import summarize, wilson_interval, write_report
from rl_bridge.config import load_config, load_section
from rl_bridge.errors import ConfigError
from rl_bridge.loops.sft import Validation
from rl_bridge.rollout import EvaluationResult, ToolTask
from rl_bridge.rollout.assignment import TRAINING_SEEDS, held_out_seeds
from rl_bridge.types import Ending

FOLDER = Path(sft.__file__).parent
ROOT = FOLDER.parents[1]
RECIPES = ("tools", "code")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files name each other from there."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", RECIPES)
def test_the_files_that_ship(name: str, tmp_path: Path) -> None:
    recipe = load_section(FOLDER / f"{name}.yaml", [], RecipeConfig)
    world = load_config(recipe.world)
    assert recipe.world == f"examples/grpo_{name}/config.yaml"
    assert isinstance(task_of(world, tmp_path), ToolTask)
    assert callable(solver_of(recipe))
    # What is learned from fits what is played with, in tokens.
    assert recipe.sft.max_length == world.rollout.max_length
    assert recipe.sft.patience is not None


@pytest.mark.parametrize("name", RECIPES)
def test_traces_validation_words_and_held_out_tasks_have_seeds_of_their_own(name: str) -> None:
    most = ["traces=1000000", "validation_traces=1000000"]
    recipe = load_section(FOLDER / f"{name}.yaml", most, RecipeConfig)
    learned = range(recipe.traces)
    looked_at = range(VALIDATION_SEEDS, VALIDATION_SEEDS + recipe.validation_traces)
    words = range(VOCABULARY_SEEDS, VOCABULARY_SEEDS + recipe.policy.vocabulary_tasks)
    episodes = load_config(recipe.world).evaluation.episodes
    played = held_out_seeds(0, episodes)
    assert learned.stop <= looked_at.start
    assert looked_at.stop <= VOCABULARY_SEEDS
    assert words.stop <= TRAINING_SEEDS <= played.start
    for key in ("traces", "validation_traces"):
        with pytest.raises(ConfigError, match=key):
            load_section(FOLDER / f"{name}.yaml", [f"{key}=1000001"], RecipeConfig)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft.learning_rat=1"], "did you mean 'sft.learning_rate'"),
        (["world=missing.yaml"], "missing.yaml"),
        (["world=examples/grpo_blackjack/config.yaml"], "BlackjackTask"),
        (["solver=examples.grpo_tools.solver:nobody"], "nobody"),
        (["--name", "old"], "choose another --name"),
        (["--name="], "letters, digits"),
        (["--name=../sft"], "letters, digits"),
    ],
)
def test_nothing_is_made_for_a_recipe_that_cannot_be_begun(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    assert sft.main(["--config", str(FOLDER / "tools.yaml"), f"output_dir={tmp_path}", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]


@pytest.mark.parametrize("error", [ConfigError("expected the solver to earn 1"), KeyboardInterrupt()])
def test_no_folder_is_left_where_nothing_was_recorded(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    async def fails(task: ToolTask, *_: object) -> None:
        made.append(task.folder.is_dir())
        raise error

    monkeypatch.setattr(sft, "record", fails)
    words = ["--config", str(FOLDER / "tools.yaml"), "--name", "new", f"output_dir={tmp_path}"]
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        assert sft.main(words) == 2
    assert made == [True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
async def test_a_solver_that_fails_is_not_imitated(tmp_path: Path) -> None:
    async def guess(_: Any, call: Any) -> None:
        await call("submit_answer", {"answer": -1})

    recipe = load_section(FOLDER / "tools.yaml", [], RecipeConfig)
    with pytest.raises(ConfigError, match="earn 1 at the task of seed 4, got 0"):
        await record(task_of(load_config(recipe.world), tmp_path), guess, [4])


def test_wilsons_interval() -> None:
    # z = 1.96; 30 of 100: centre (0.3 + 3.8416/200) / 1.038416 = 0.307399,
    # margin 1.96 / 1.038416 * sqrt(0.21/100 + 3.8416/40000) = 0.088450.
    assert wilson_interval(30, 100) == pytest.approx((0.218949, 0.395849), abs=2e-4)
    assert wilson_interval(0, 50)[0] == 0.0
    assert wilson_interval(0, 50)[1] == pytest.approx(3.8416 / 53.8416)
    assert wilson_interval(50, 50)[1] == pytest.approx(1.0)


def test_the_report_counts_what_earned_1_and_shows_how_a_run_has_learned(tmp_path: Path) -> None:
    rows = [
        {"iteration": n, "time/elapsed_s": 6.0 * n, "rollout/reward_mean": 0.05 * n} for n in range(1, 20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    endings = [Ending.COMPLETED] * 3 + [Ending.UNPARSABLE_CALL]
    result = EvaluationResult(rewards=[1.0, 0.5, 0.0, -0.5], endings=endings, dropped=1, train_seconds=9.0)
    write_report(tmp_path, result)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["tasks"], report["solved"], report["success"], report["dropped"]) == (4, 1, 0.25, 1)
    assert report["endings"] == {"completed": 3, "unparsable_call": 1}
    assert report["ci95"] == pytest.approx(list(wilson_interval(1, 4)))
    picture = pixels(tmp_path / "learning_curve.png")
    assert picture.min() < picture.max()
    judged = summarize(dataclasses.replace(result, unscored=2))  # what nobody could judge is not solved
    assert (judged["tasks"], judged["solved"], judged["success"]) == (6, 1, pytest.approx(1 / 6))
    assert summarize(dataclasses.replace(result, rewards=[], endings=[]))["success"] is None


def pixels(picture: Path) -> NDArray[np.float32]:
    import matplotlib.image  # takes long, and each worker imports this file

    image: NDArray[np.float32] = matplotlib.image.imread(picture)
    return image


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RECIPES)
def test_the_whole_recipe_at_toy_size(name: str, tmp_path: Path) -> None:
    from examples.sft.pictures import draw_losses
    from rl_bridge.generator.replica import Checkpoint
    from rl_bridge.tokens.chat import ChatTokenizer

    toy = [
        f"output_dir={tmp_path}", "traces=6", "validation_traces=2", "policy.width=64", "policy.layers=1",
        "policy.vocabulary_tasks=2", "sft.batch_size=3", "sft.max_updates=30", "sft.evaluate_every=5",
        "sft.warmup_updates=2", "sft.learning_rate=0.003",
    ]  # fmt: skip
    assert sft.main(["--config", str(FOLDER / f"{name}.yaml"), "--name", "toy", *toy]) == 0
    validations = [json.loads(line) for line in (tmp_path / "toy" / "sft.jsonl").read_text().splitlines()]
    assert (validations[0]["update"], validations[0]["loss"]) == (0, None)
    assert validations[-1]["loss"] < 0.7 * validations[1]["loss"]
    picture = pixels(tmp_path / "toy" / "losses.png")
    seen = [Validation(**validation) for validation in validations]
    best = min(seen, key=lambda validation: validation.validation_loss)
    draw_losses(seen, tmp_path / "again.png", kept=best)
    assert np.array_equal(picture, pixels(tmp_path / "again.png"))
    draw_losses(seen[:1], tmp_path / "less.png", kept=seen[0])
    assert not np.array_equal(picture, pixels(tmp_path / "less.png"))
    policy = tmp_path / "toy" / "policy"
    ChatTokenizer(policy)
    began, ended = (Checkpoint(folder).tensors() for folder in (tmp_path / "toy" / "initial_policy", policy))
    Checkpoint(tmp_path / "toy" / "initial_policy").require_same_shapes(ended)
    assert all(not began[key].equal(ended[key]) for key in began if "proj" in key)
