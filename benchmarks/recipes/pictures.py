"""The curves of a benchmark's runs, a picture for each recipe."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.parts import kept_at
from benchmarks.recipes.plan import Plan, reinforced


def draw(plan: Plan, folder: Path) -> Iterator[Path]:
    """Draw how often the tasks of training were solved as reinforcement learning went on.

    Args:
        plan: What was measured.
        folder: Where its parts are.

    Yields:
        Each picture that was drawn: none of a recipe that has not learned yet. A run that was interrupted is in none.
    """
    from examples.sft.pictures import draw_success_curves

    for name in plan.recipes:
        parts = {f"seed {seed}": reinforced(name, seed) for seed in plan.seeds}
        runs = {
            who: folder / part
            for who, part in parts.items()
            if kept_at(folder, part).is_file() and (folder / part / "metrics.jsonl").is_file()
        }
        if runs:
            picture = folder / f"{name}.png"
            draw_success_curves(runs, picture, title=f"grpo_{name}: tasks of training, as they are sampled")
            yield picture
