"""The curves of a benchmark's runs, a picture for each recipe."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.parts import result_file
from benchmarks.recipes.plan import Plan, reinforcement_part


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
        parts = {f"seed {seed}": reinforcement_part(name, seed) for seed in plan.seeds}
        runs = {
            subject: folder / part_folder
            for subject, part_folder in parts.items()
            if result_file(folder, part_folder).is_file()
            and (folder / part_folder / "metrics.jsonl").is_file()
        }
        if runs:
            picture = folder / f"{name}.png"
            draw_success_curves(runs, picture, title=f"grpo_{name}: tasks of training, as they are sampled")
            yield picture
