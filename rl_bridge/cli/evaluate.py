"""`ropewalk eval --config FILE`: play held-out episodes with the policy of a training run's file."""

import time
from collections.abc import Sequence
from pathlib import Path

from rl_bridge.cli.common import exit_status


def evaluate_config(config: str, overrides: Sequence[str], name: str | None) -> int:
    """Evaluate; returns the exit status: 0, 1 if it failed, 2 for a bad command line.

    Args:
        config: A run's YAML file, or the folder of an evaluation to resume.
        overrides: Changed keys, each as `section.key=value`.
        name: The evaluation's folder below output_dir; None makes one of the run's name and the time.
    """
    return exit_status("eval", lambda: _evaluate(config, overrides, name))


def _evaluate(file: str, overrides: Sequence[str], name: str | None) -> int:
    from rl_bridge.config import load_config, load_saved_config, require_name
    from rl_bridge.errors import ConfigError
    from rl_bridge.loops.folder_lock import LOCK_FILE

    path = Path(file)
    if (resume := path.is_dir()) and (path / LOCK_FILE).exists():
        raise ConfigError(
            f"expected an evaluation's folder, got a run's; go on with it by: ropewalk train --resume {file}"
        )
    config = load_saved_config(path, overrides) if resume else load_config(path, overrides)
    require_name(name, kind="evaluations")
    from rl_bridge.loops.session import evaluate_run

    folder = name or f"{config.name}-evaluation-{time.strftime('%Y%m%d-%H%M%S')}"
    evaluate_run(config, path if resume else Path(config.output_dir) / folder, resume=resume)
    return 0
