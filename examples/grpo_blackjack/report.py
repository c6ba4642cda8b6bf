"""The report of a run: its results next to the baselines, as JSON, as a table and as pictures."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from envs.blackjack_env.baselines import baselines
from envs.blackjack_env.oracle import Answer, DecisionState, Rules, agreement, evaluate
from examples.grpo_blackjack.hands import count_hands, load_metrics
from rl_bridge.config import Config
from rl_bridge.rollout import EvaluationResult
from rl_bridge.types import Ending


def write_report(
    folder: Path,
    *,
    answers: Mapping[DecisionState, Answer],
    result: EvaluationResult,
    config: Config,
    rules: Rules,
) -> None:
    """Write report.json, learning_curve.png and policy_grid.png into the run's folder, and print a table.

    Args:
        folder: The run's folder.
        answers: The greedy policy's answer to every observation.
        result: The held-out hands.
        config: The run's configuration.
        rules: The payout of naturals.
    """
    # Every process of a run imports the task, hence this module; only the controller, at the end, needs matplotlib.
    from examples.grpo_blackjack.pictures import draw_learning_curve, draw_policy_grid

    metrics = folder / "metrics.jsonl"
    report = summarize(answers, result, config=config, rules=rules, rows=load_metrics(metrics))
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw_learning_curve(metrics, folder / "learning_curve.png", config=config, rules=rules)
    draw_policy_grid(answers, folder / "policy_grid.png")
    _print(report, folder)


def answer_rates(answers: Mapping[DecisionState, Answer]) -> dict[str, float]:
    """Return the shares of observations that are answered legally, with hit and with stand."""
    hit, stand = (sum(answer == action for answer in answers.values()) for action in ("hit", "stand"))
    return {"legal": (hit + stand) / len(answers), "hit": hit / len(answers), "stand": stand / len(answers)}


def summarize(
    answers: Mapping[DecisionState, Answer],
    result: EvaluationResult,
    *,
    config: Config,
    rules: Rules,
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the report as plain values.

    Rates, `mean_return` and its 95% interval `ci95` (normal approximation) are those of the held-out hands, and null
    without them. `exact_return`, the agreements and the greedy rates are computed from the answers to all observations.
    `training_hands` is counted from `rows`, the logged metrics of each iteration.
    """
    exact = evaluate(answers, rules=rules, illegal_return=config.reward.illegal_answer)
    agreement_rates = agreement(answers)
    hands = len(result.rewards)
    sampled_rates: dict[str, Any] = dict.fromkeys(
        ("mean_return", "ci95", "win_rate", "push_rate", "loss_rate", "illegal_rate", "exact_within_ci95")
    )
    if hands > 1:
        mean = statistics.fmean(result.rewards)
        margin = 1.96 * statistics.stdev(result.rewards) / math.sqrt(hands)
        legal = [r for r, e in zip(result.rewards, result.endings, strict=True) if e is not Ending.ILLEGAL]
        sampled_rates = {
            "mean_return": mean,
            "ci95": [mean - margin, mean + margin],
            "win_rate": sum(r > 0 for r in legal) / hands,
            "push_rate": sum(r == 0 for r in legal) / hands,
            "loss_rate": sum(r < 0 for r in legal) / hands,
            "illegal_rate": 1 - len(legal) / hands,
            "exact_within_ci95": abs(mean - exact.mean_return) <= margin,
        }
    return {
        "exact_return": exact.mean_return,
        **sampled_rates,
        "optimal_agreement": agreement_rates.unweighted,
        "optimal_agreement_weighted": agreement_rates.weighted,
        **{f"greedy_{name}_rate": rate for name, rate in answer_rates(answers).items()},
        "hands": hands,
        "hands_dropped": result.dropped,
        "training_hands": round(sum(count_hands(rows)[-1:])),
        "train_seconds": result.train_seconds,
        "seed": config.seed,
        "answer_masking": False,
        "baselines": {
            key: {
                "title": baseline.title,
                "exact_return": baseline.evaluation.mean_return,
                "win_rate": baseline.evaluation.win,
                "push_rate": baseline.evaluation.push,
                "loss_rate": baseline.evaluation.loss,
            }
            for key, baseline in baselines(rules).items()
        },
    }


def _print(report: Mapping[str, Any], folder: Path) -> None:
    table = Table(title="BlackJack: greedy policy and baselines")
    for heading in ("policy", "exact return", "win", "push", "loss"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in report["baselines"].values():
        table.add_row(
            row["title"],
            f"{row['exact_return']:+.4f}",
            *(f"{row[k]:.1%}" for k in ("win_rate", "push_rate", "loss_rate")),
        )
    rates = (report[k] for k in ("win_rate", "push_rate", "loss_rate"))
    table.add_row(
        "learned (rates of held-out hands)",
        f"{report['exact_return']:+.4f}",
        *("-" if rate is None else f"{rate:.1%}" for rate in rates),
        style="bold",
    )
    console = Console()
    console.print(table)
    console.print(
        f"agreement with the optimal action: {report['optimal_agreement']:.1%} of all observations, "
        f"{report['optimal_agreement_weighted']:.1%} of the decisions met in play",
        highlight=False,
    )
    legal, hit, stand = (report[f"greedy_{name}_rate"] for name in ("legal", "hit", "stand"))
    console.print(
        f"greedy answers to all observations: {legal:.1%} legal, {hit:.1%} hit, {stand:.1%} stand",
        highlight=False,
    )
    if report["mean_return"] is not None:
        low, high = report["ci95"]
        verdict = "agrees with" if report["exact_within_ci95"] else "DISAGREES with"
        console.print(
            f"{report['hands']:,} held-out hands: mean return {report['mean_return']:+.4f} "
            f"(95% interval {low:+.4f} to {high:+.4f}), which {verdict} the exact return; "
            f"illegal answers {report['illegal_rate']:.2%}; answers were not masked",
            highlight=False,
        )
    if report["hands_dropped"]:
        console.print(f"{report['hands_dropped']:,} held-out hands were lost to failures and are in no rate")
    console.print(
        f"seed {report['seed']}, {report['training_hands']:,} training hands in {report['train_seconds']:.0f} s",
        highlight=False,
    )
    for name in ("report.json", "learning_curve.png", "policy_grid.png"):
        console.print(f"  {folder / name}", highlight=False, soft_wrap=True)
