"""docs/algorithms.md: its names, keys and figures are those of the code."""

import re
from pathlib import Path

import torch

from rl_bridge.config import PRESETS, AlgorithmConfig
from rl_bridge.rollout.groups import rollout_figures
from rl_bridge.trainer.figures import ALWAYS, FigureAccumulator, figures_of, shown_figures
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_preset_and_every_key_is_named() -> None:
    assert first_column(PAGE.split("\n## ")[0]) == list(PRESETS)
    named = set(re.findall(r"`([a-z_]+)`", section("What can be chosen") + section("Engine and trainer")))
    assert set(AlgorithmConfig.model_fields) - {"name"} <= named
    assert set(first_column(section("What can be chosen"))) <= set(AlgorithmConfig.model_fields)


def test_what_the_loss_tells_is_listed() -> None:
    from rl_bridge.trainer.figures import _MEANS

    listed = section("What is always logged")
    everything = shown_figures(
        AlgorithmConfig(dual_clip=3.0, correction="truncated", kl_coef=0.1), with_reference=True
    )
    assert all(f"`{_MEANS[name]}`" in listed for name in everything)
    always, _, sometimes = listed.partition("Where there is such a thing")
    assert all(f"`{_MEANS[name]}`" in (always if name in ALWAYS else sometimes) for name in everything)


def test_what_is_always_logged_always_is() -> None:
    """With the least of a batch: a token of older weights than the trainer's, and nothing that is optional."""
    accumulator = FigureAccumulator()
    told = {name: torch.zeros(1) for name in ("ratio", "logprob_difference")}
    accumulator.add(told, fresh=torch.tensor([False]))
    shown = shown_figures(AlgorithmConfig(), with_reference=False)
    answer = Completion(tokens=[1], logprobs=[0.0], versions=[0], stopped=True)
    one = Trajectory(seed=0, turns=[Turn(prompt=[1], completion=answer)], ending=Ending.COMPLETED, reward=0.0)
    logged = {
        **figures_of(accumulator.sums, accumulator.largest, shown=shown),
        **rollout_figures([Group(seed=0, trajectories=[one, one])], version=1),
    }
    always, _, _ = section("What is always logged").partition("Where there is such a thing")
    for name in first_column(always):
        assert any(re.fullmatch(re.sub("<.*?>", ".+", name), figure) for figure in logged), name
