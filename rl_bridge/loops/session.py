"""A run or an evaluation as a whole: start everything, train, evaluate, report, stop everything."""

import asyncio
import contextlib
import json
import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from openenv_core.evaluation.endpoint import to_plain_text
from openenv_core.evaluation.records import (
    FIGURES_FILE,
    RECORDS_FILE,
    EpisodeRecord,
    EvaluationFolder,
    describe_missing,
    summarize,
)
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config, colocate_if_needed, make_folder_exists_error, save_config
from rl_bridge.errors import ConfigError, RolloutError
from rl_bridge.loops.assembly import LOGS, Players, open_players, open_run
from rl_bridge.loops.evaluation import evaluate, ready_to_evaluate, result_of, summary_of
from rl_bridge.loops.folder_lock import folder_of_ones_own, is_unused
from rl_bridge.loops.recovery import train_to_the_end
from rl_bridge.loops.run import Run, writing
from rl_bridge.metrics.spans import PROCESS_SPANS
from rl_bridge.rollout.task import REPORT_FILE, Task, load_tasks, to_floats
from rl_bridge.services.hosts import Hosts
from rl_bridge.trainer.checkpoints import newest_checkpoint

INTERRUPTED = 130


def train_run(config: Config, folder: Path, *, resume: bool) -> int:
    """Train, evaluate and report, in a new folder or, with `resume`, that of an earlier run.

    Returns:
        0, or 130 if the run was interrupted. Either way nothing is left running.

    Raises:
        rl_bridge.errors.RunInUseError: Another process writes to the folder.
        rl_bridge.errors.BridgeError: The run failed.
    """
    config = colocate_if_needed(config, len(Hosts.this_machine().gpus))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with ExitStack() as stack:
        _open(stack, folder, config, resume=resume)
        return _train(config, folder, resume=resume)


def _train(config: Config, folder: Path, *, resume: bool) -> int:
    console = Console()
    try:
        whole = asyncio.run(_session(config, folder, console=console, resume=resume))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(_interrupted(config, folder), highlight=False, soft_wrap=True)
        return INTERRUPTED
    except Exception:
        if not resume and not (folder / LOGS).exists():
            # Nothing was started: free the name for the next attempt.
            shutil.rmtree(folder, ignore_errors=True)
        raise
    console.print(
        _next_steps(config, folder) if whole else _interrupted(config, folder),
        highlight=False,
        soft_wrap=True,
    )
    return 0 if whole else INTERRUPTED


def _open(stack: ExitStack, folder: Path, config: Config, *, resume: bool) -> None:
    """Lock the folder until the stack is closed; write the configuration of a new run into it."""
    with _writing_to(folder):
        if not resume:
            _require_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(folder_of_ones_own(folder))
        if not resume:
            _require_unused(folder)  # again: another run may have started here before the lock
            try:
                save_config(config, folder)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)  # nothing else is in it
                raise
        elif (trained := newest_checkpoint(folder)) > config.trainer.iterations:
            raise ConfigError(
                f"expected trainer.iterations of at least {trained}, which the run has behind it, "
                f"got {config.trainer.iterations}"
            )


def _require_unused(folder: Path) -> None:
    if not is_unused(folder):
        raise make_folder_exists_error(folder)


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run's folder {str(folder)!r}: {error.strerror}; "
            "see that there is room, and that it is yours to write to"
        ) from error


def _next_steps(config: Config, folder: Path) -> str:
    """Return a message with the policy's path, and commands for the next steps."""
    steps = {
        f"ropewalk rollouts {folder}": "read what was played",
        f"tensorboard --logdir {config.output_dir}": "see the metrics",
        f"ropewalk train --resume {folder} trainer.iterations={2 * config.trainer.iterations}": "train on",
    }
    width = max(map(len, steps)) + 3
    lines = [f"  {command:<{width}}{reason}" for command, reason in steps.items()]
    return "\n".join([f"the policy is in {folder / 'policy'}, and everything else beside it; next:", *lines])


def _interrupted(config: Config, folder: Path) -> str:
    if not config.trainer.checkpoint_interval:
        return "interrupted; trainer.checkpoint_interval is 0, so no checkpoint was kept"
    if not (newest := newest_checkpoint(folder)):
        return "interrupted before the first checkpoint"
    return f"interrupted; go on after iteration {newest} with: ropewalk train --resume {folder}"


def _on_sigterm() -> list[Callable[[], object]]:
    """Handle SIGTERM; return its callbacks, each called once, last first. The first one cancels, as Ctrl-C does."""
    current = asyncio.current_task()
    assert current is not None
    terminated: list[Callable[[], object]] = [current.cancel]

    def on_sigterm() -> None:
        if terminated:
            terminated.pop()()

    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    return terminated


async def _session(config: Config, folder: Path, *, console: Console, resume: bool) -> bool:
    """Run to the end; return False if the run was preempted."""
    terminated = _on_sigterm()
    async with open_run(config, folder, console=console, resume=resume) as (run, fleet):
        if resume:
            # Only now: the next `--resume` must not pick up a configuration that cannot be started.
            with _writing_to(folder):
                save_config(config, folder)
        PROCESS_SPANS.started()
        if config.rollout.checkpoint_on_preemption:
            terminated.append(run.preempt)
        if not await fleet.guard(train_to_the_end(run)):
            return False
        # Everything is in the last checkpoint: from now on SIGTERM cancels at once.
        del terminated[1:]
        await fleet.guard(_report(run))
        return True


async def _report(run: Run) -> None:
    folder = run.folder / "evaluation"
    results = await evaluate(run, folder, version=run.version)
    reports = {name: summarize(records) for name, records in results.items()}
    if any(results.values()):
        EvaluationFolder(folder).finish(_whole(results, reports))
    with writing(run.folder, "the report"):
        for name, task in run.tasks.items():
            await task.report(run.chat, result_of(results[name], train_seconds=run.train_seconds))
        if "" not in results:
            report = _whole(results, reports)
            (run.folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def evaluate_run(config: Config, folder: Path, *, resume: bool = False) -> None:
    """Play `evaluation.episodes` held-out episodes as a run does; print a report, and write it to the folder.

    Nothing is trained: there is no trainer, and the generators have all the GPUs they need. The folder gets the report
    and the logs, and is removed if nothing was started; `resume` continues its evaluation. Ctrl-C and SIGTERM raise
    KeyboardInterrupt.
    """
    model_path = ready_to_evaluate(config)
    try:
        folder.mkdir(parents=True, exist_ok=resume)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {str(folder)!r}: {error.strerror}; --name chooses another"
        ) from error
    try:
        asyncio.run(_evaluation(config, model_path, folder, Console()))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if (folder / RECORDS_FILE).exists() and not (folder / FIGURES_FILE).exists():
            _say(Console(stderr=True), f"continue it with: ropewalk eval --resume {folder}")
        if not (folder / LOGS).exists():
            with contextlib.suppress(OSError):  # not empty: the task has written something
                folder.rmdir()


async def _evaluation(config: Config, model_path: Path, folder: Path, console: Console) -> None:
    _on_sigterm()
    tasks = load_tasks(config, folder)
    nothing_to_train = ReplayBuffer(
        Ledger(max_losses=None),
        Admission(groups_per_batch=1, max_staleness=0, iterations=0),
        timeout_s=1.0,
        straggler_timeout_s=1.0,
    )
    async with open_players(
        config, folder, model_path=model_path, buffer=nothing_to_train, store=None, console=console
    ) as players:
        save_config(config, folder)
        names = ", ".join(str(task.config.rollout.task) for task in tasks.values())
        _say(console, f"{config.evaluation.episodes:,} held-out episodes of {names}")
        results, probes = await players.fleet.guard(_play(players, tasks, folder))
    reports = {name: summarize(records) | {"probe": probes[name]} for name, records in results.items()}
    report = _whole(results, reports)
    console.print_json(data=report)
    for name, summary in reports.items():
        if summary["last_absence"] is not None:
            _say(console, f"{name}: {describe_missing(summary)}" if name else describe_missing(summary))
    EvaluationFolder(folder).finish(report)
    _say(console, f"written to {folder}")


async def _play(
    players: Players, tasks: Mapping[str, Task], folder: Path
) -> tuple[dict[str, list[EpisodeRecord]], dict[str, dict[str, float]]]:
    results = await evaluate(players, folder)
    whole = summary_of(results)
    if not whole["episodes"]:
        raise RolloutError(
            f"none of {players.config.evaluation.episodes} held-out episodes could be played, the last one because: "
            f"{whole['last_absence']}"
        )
    return results, {name: to_floats(await task.probe(players.chat), "probe") for name, task in tasks.items()}


def _whole(
    results: Mapping[str, list[EpisodeRecord]], reports: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    return reports[""] if "" in reports else summary_of(results) | {"environments": reports}


def _say(console: Console, text: str) -> None:
    console.print(to_plain_text(text, 1000), markup=False, highlight=False, soft_wrap=True)
