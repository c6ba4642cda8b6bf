"""Learning curves of the benchmark's runs, one picture for each recipe."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.parts import result_file
from benchmarks.recipes.plan import Plan, reinforcement_part


def draw(plan: Plan, folder: Path) -> Iterator[Path]:
    """Draw the share of training tasks solved over the iterations of reinforcement learning.

    Args:
        plan: What was measured.
        folder: Folder of its parts.

    Yields:
        The path of each picture. Interrupted runs are left out, and so are recipes without a complete run.
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
