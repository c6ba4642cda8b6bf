"""Plots of the learning curve with the baselines, and of the learned policy next to the optimal one."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np

from envs.blackjack_env.baselines import baselines
from envs.blackjack_env.oracle import (
    DEALER_CARDS,
    HARD_TOTALS,
    SOFT_TOTALS,
    Answer,
    DecisionState,
    Rules,
    optimal_policy,
)
from examples.grpo_blackjack.hands import count_hands, load_metrics
from rl_bridge.config import Config

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

_CODES: Mapping[Answer, int] = {"stand": 0, "hit": 1, None: 2}
_COLOURS = ListedColormap(["#c8553d", "#2a9d8f", "#222222"])
_SMOOTHING = 10
"""Number of iterations in the moving average of the sampled curve."""


def draw_learning_curve(metrics: Path, picture: Path, *, config: Config, rules: Rules) -> None:
    """Plot the return per hand against hands played: sampled while exploring, and exact for the greedy policy.

    Args:
        metrics: The run's JSON lines. The sampled curve is the mean over all hands played, including groups that
            dynamic sampling refused.
        picture: Path of the PNG.
        config: The run's configuration.
        rules: Rules of the baselines.
    """
    rows = load_metrics(metrics)
    hands = count_hands(rows)
    sampled = np.array([row["rollout/reward_mean"] for row in rows])
    width = min(_SMOOTHING, len(rows))
    smooth = np.convolve(sampled, np.full(width, 1 / width), mode="valid")
    probes = [
        (h, row["probe/exact_return"])
        for h, row in zip(hands, rows, strict=True)
        if "probe/exact_return" in row
    ]
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axes.plot(
        hands[width - 1 :],
        smooth,
        color="#8888aa",
        marker="o" if len(smooth) == 1 else None,  # a single point has no line
        label=f"sampled, exploring (mean of {width} iterations)",
    )
    axes.plot(*zip(*probes, strict=True), color="#1d3557", marker="o", markersize=3, label="greedy, exact")
    shades = plt.get_cmap("autumn")(np.linspace(0.0, 0.75, len(baselines(rules))))
    for shade, baseline in zip(shades, baselines(rules).values(), strict=True):
        value = baseline.evaluation.mean_return
        axes.axhline(value, color=shade, linestyle="--", linewidth=1, label=f"{baseline.title}: {value:.4f}")
    axes.set(
        xlabel="training hands",
        ylabel="return per hand",
        ylim=(-0.5, 0.0),
        title=f"BlackJack, seed {config.seed}",
    )
    axes.legend(loc="lower right", fontsize=8, framealpha=1.0)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def draw_policy_grid(answers: Mapping[DecisionState, Answer], picture: Path) -> None:
    """Plot hard and soft totals against the dealer's card, for the learned policy and the optimal one.

    Args:
        answers: An answer for every observation.
        picture: Path of the PNG. Crosses mark where the learned policy differs.
    """
    optimal = optimal_policy()
    figure, axes = plt.subplots(2, 2, figsize=(9, 9), layout="constrained", height_ratios=(18, 10))
    for row, (name, totals, soft) in enumerate((("hard", HARD_TOTALS, False), ("soft", SOFT_TOTALS, True))):
        for column, (title, policy) in enumerate((("learned", answers), ("optimal", optimal))):
            grid = [[_CODES[policy[DecisionState(t, soft, d)]] for d in DEALER_CARDS] for t in totals]
            panel = axes[row][column]
            panel.imshow(grid, cmap=_COLOURS, vmin=0, vmax=2, origin="lower", aspect="auto")
            panel.set_xticks(range(len(DEALER_CARDS)), ["A", *map(str, DEALER_CARDS[1:])])
            panel.set_yticks(range(len(totals)), list(map(str, totals)))
            panel.set(title=f"{title}, {name} totals", xlabel="dealer's card", ylabel="player's total")
            differs = [
                (x, y)
                for y, t in enumerate(totals)
                for x, d in enumerate(DEALER_CARDS)
                if policy[DecisionState(t, soft, d)] != optimal[DecisionState(t, soft, d)]
            ]
            if differs:
                panel.plot(*zip(*differs, strict=True), "x", color="white")
    handles = [Rectangle((0, 0), 1, 1, color=_COLOURS(code)) for code in range(3)]
    figure.legend(
        handles,
        ["stand", "hit", "illegal answer"],
        loc="outside lower center",
        ncols=3,
        title="a cross marks a difference from the optimum",
    )
    figure.savefig(picture, dpi=120)
    plt.close(figure)
