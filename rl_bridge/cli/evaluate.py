"""`ropewalk evaluate`: a policy plays held-out episodes, and is not trained."""

import argparse
import time
from pathlib import Path

from openenv_core.cli import Command
from rl_bridge.cli.common import add_overrides, exit_status, overrides_first_class


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--config", metavar="FILE", required=True, help="a run's YAML file")
    parser.add_argument("--name", help="the folder below output_dir; by default the run's name and the time")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; returns the exit status: 0, 1 if it failed, 2 if it was asked for wrongly."""
    return exit_status("evaluate", lambda: _evaluate(arguments))


def _evaluate(arguments: argparse.Namespace) -> int:
    from rl_bridge.config import load_config, require_name

    config = load_config(arguments.config, arguments.overrides)
    require_name(arguments.name, what="evaluations")
    from rl_bridge.loops.session import evaluate_run

    name = arguments.name or f"{config.name}-evaluation-{time.strftime('%Y%m%d-%H%M%S')}"
    evaluate_run(config, Path(config.output_dir) / name)
    return 0


COMMAND = Command(
    name="evaluate",
    help="have a policy play held-out episodes, without training it",
    configure=configure,
    run=run,
    reword=overrides_first_class,
    examples=(
        "ropewalk evaluate --config examples/grpo_blackjack/config.yaml model.path=CHECKPOINT",
        "ropewalk evaluate --config examples/grpo_blackjack/config.yaml generator.engine=openai "
        "generator.url=http://localhost:8000/v1 generator.model=NAME model.path=TOKENIZER",
    ),
)
