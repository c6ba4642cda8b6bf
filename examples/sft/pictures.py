"""Plots of what a policy learned from traces and from rewards."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np

from rl_bridge.loops.sft import Validation

mpl.use("agg")
import matplotlib.pyplot as plt

SMOOTHING: Final = 10
"""Number of iterations in a curve's moving average."""


def draw_success_curves(runs: Mapping[str, Path], picture: Path, *, title: str) -> None:
    """Plot the mean reward of all episodes played while exploring against minutes of training.

    Args:
        runs: The runs' folders, by label. For tasks with rewards 0 and 1 the mean is the share solved.
        picture: Path of the PNG.
        title: Title of the plot.
    """
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for name, folder in runs.items():
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "rollout/reward_mean" in row]
        if not rows:
            continue
        minutes = np.array([row["time/elapsed_s"] for row in rows]) / 60.0
        width = min(SMOOTHING, len(rows))
        smooth = np.convolve(
            [row["rollout/reward_mean"] for row in rows], np.full(width, 1 / width), mode="valid"
        )
        axes.plot(minutes[width - 1 :], smooth, marker="o" if len(smooth) == 1 else None, label=name)
    axes.set(
        xlabel="minutes of training",
        ylabel=f"mean reward of what was played (mean of {SMOOTHING} iterations)",
        title=title,
    )
    axes.set_ylim(0.0, 1.0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", framealpha=1.0)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def draw_losses(validations: Sequence[Validation], picture: Path, *, kept: Validation) -> None:
    """Plot the losses of training and of validation traces against updates.

    Args:
        validations: The validations, in order.
        picture: Path of the PNG.
        kept: The validation whose weights were kept.
    """
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    learned = [
        (validation.update, validation.loss) for validation in validations if validation.loss is not None
    ]
    validated = [(validation.update, validation.validation_loss) for validation in validations]
    for curve, label in ((learned, "of the newest batch"), (validated, "of validation")):
        marker = "o" if len(curve) == 1 else None
        axes.plot([update for update, _ in curve], [loss for _, loss in curve], marker=marker, label=label)
    axes.axvline(kept.update, color="grey", linestyle=":", label=f"kept: {kept.validation_loss:.4f}")
    axes.set(xlabel="updates", ylabel="-mean log pi of the assistant's tokens", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="upper right", framealpha=1.0)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
