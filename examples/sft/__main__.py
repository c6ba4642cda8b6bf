"""Teach a tiny policy to call tools: `python -m examples.sft --config examples/sft/tools.yaml --name sft-tools`."""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from examples.sft.recipe import VALIDATION_SEEDS, VOCABULARY_SEEDS, RecipeConfig, record, solver_of, task_of
from openenv_core.errors import OpenEnvError
from rl_bridge.config import load_config, load_section, require_name
from rl_bridge.data.traces import Solver, Trace, load_traces, samples_of, save_traces
from rl_bridge.errors import BridgeError, ConfigError
from rl_bridge.loops.sft import SftResult, Validation, begin_checkpoint, fine_tune, trainer_settings
from rl_bridge.rollout import ToolTask
from rl_bridge.types import TrainSample

POLICY = "policy"
"""Name of the trained checkpoint in the run's folder."""
LOSSES = "losses.png"
TRACES, VALIDATION = "traces.jsonl", "validation.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """Record traces, make a policy, teach it; returns the exit status: 0, 1 if it failed, 2 for a bad command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.sft", description=__doc__)
    parser.add_argument("--config", metavar="FILE", required=True, help="the recipe's YAML file")
    parser.add_argument("--name", help="the folder below output_dir; by default the recipe's name")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override a key of the file"
    )
    arguments = parser.parse_args(argv)
    try:
        require_name(arguments.name, kind="runs")
        recipe = load_section(arguments.config, arguments.overrides, RecipeConfig)
        folder = Path(recipe.output_dir) / (arguments.name or recipe.name)
        if folder.exists():
            raise ConfigError(f"expected a new folder, {str(folder)!r} exists; choose another --name")
        teach(recipe, folder)
    except ConfigError as error:
        print(f"examples.sft: {error}", file=sys.stderr)
        return 2
    except (BridgeError, OpenEnvError) as error:  # OpenEnvError: from the server that traces are played on
        print(f"examples.sft: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def teach(recipe: RecipeConfig, folder: Path) -> SftResult:
    """Run the whole recipe, with results in `folder`.

    Raises:
        BridgeError: A step failed.
    """
    # 1. Traces: the scripted solver plays.
    task, solver = task_of(load_config(recipe.world), folder), solver_of(recipe)
    folder.mkdir(parents=True)
    try:
        vocabulary, training, validation = asyncio.run(_record_traces(recipe, task, solver))
    except BaseException:
        with contextlib.suppress(OSError):  # a folder with other files in it stays
            folder.rmdir()  # so that the name can be used again
        raise
    save_traces(folder / TRACES, training)
    save_traces(folder / VALIDATION, validation)
    print(f"{len(training)} training traces, {len(validation)} validation traces: {folder}")

    # 2. A random policy with a tokenizer for these texts.
    from examples.sft.tiny_policy import make_tool_policy

    initial = make_tool_policy(
        folder / "initial_policy",
        [*vocabulary, *training],
        seed=recipe.sft.seed,
        width=recipe.policy.width,
        layers=recipe.policy.layers,
    )

    # 3. Imitation, until the validation loss stops falling.
    result = imitate(recipe, folder, initial)
    print(
        f"{'settled' if result.settled else 'stopped'} after {result.validations[-1].update} updates; kept those of "
        f"{result.kept.update}, validation loss {result.kept.validation_loss:.4f}\n"
        f"continue with: ropewalk train --config {recipe.world} model.path={folder / POLICY}"
    )
    return result


def imitate(recipe: RecipeConfig, folder: Path, model_path: Path, *, last: Path | None = None) -> SftResult:
    """Fine-tune a checkpoint on the traces in a folder, which also gets the metrics and the result in `policy`.

    Args:
        recipe: The recipe.
        folder: Folder with `traces.jsonl` and `validation.jsonl`.
        model_path: The checkpoint.
        last: A folder to create for the last weights, in addition to those of the best validation.

    Returns:
        The validations, and which weights were kept.

    Raises:
        BridgeError: Training failed.
    """
    from examples.sft.pictures import draw_losses
    from rl_bridge.tokens.chat import ChatTokenizer
    from rl_bridge.trainer.trainer import Trainer

    tokenizer = ChatTokenizer(model_path)

    def load_rows(name: str) -> list[list[TrainSample]]:
        return [samples_of(trace, tokenizer, index=0) for trace in load_traces(folder / name)]

    for checkpoint in (folder / POLICY, last):
        if checkpoint is not None:
            begin_checkpoint(checkpoint, model_path)
    learner = Trainer(trainer_settings(recipe.sft, folder, model_path))
    with (folder / "sft.jsonl").open("w", encoding="utf-8") as file:

        def on_validation(validation: Validation) -> None:
            print(json.dumps(asdict(validation)), file=file, flush=True)
            loss = "     -" if validation.loss is None else f"{validation.loss:.4f}"
            print(
                f"update {validation.update:5d}  loss {loss}  validation {validation.validation_loss:.4f}  "
                f"{validation.seconds:.0f} s"
            )

        result = fine_tune(
            learner,
            load_rows(TRACES),
            load_rows(VALIDATION),
            recipe.sft,
            folder=folder / POLICY,
            on_validation=on_validation,
            last=last,
        )
    draw_losses(result.validations, folder / LOSSES, kept=result.kept)
    return result


async def _record_traces(
    recipe: RecipeConfig, task: ToolTask, solver: Solver
) -> tuple[list[Trace], list[Trace], list[Trace]]:
    traces = await record(
        task,
        solver,
        [
            *range(VOCABULARY_SEEDS, VOCABULARY_SEEDS + recipe.policy.vocabulary_tasks),
            *range(recipe.traces),
            *range(VALIDATION_SEEDS, VALIDATION_SEEDS + recipe.validation_traces),
        ],
    )
    vocabulary_end, training_end = (
        recipe.policy.vocabulary_tasks,
        recipe.policy.vocabulary_tasks + recipe.traces,
    )
    return traces[:vocabulary_end], traces[vocabulary_end:training_end], traces[training_end:]


if __name__ == "__main__":
    sys.exit(main())
