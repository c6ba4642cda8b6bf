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
    warnings_of,
)
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config, colocate_if_needed, make_folder_exists_error, save_config
from rl_bridge.errors import CheckpointError, ConfigError, RolloutError
from rl_bridge.loops.assembly import LOGS, Players, open_players, open_run
from rl_bridge.loops.evaluation import (
    evaluate,
    require_policy_folder,
    result_of,
    summaries_of,
    summary_of,
)
from rl_bridge.loops.folder_lock import is_unused, lock_folder
from rl_bridge.loops.recovery import train_with_recovery
from rl_bridge.loops.run import Run, convert_write_errors
from rl_bridge.metrics.spans import PROCESS_SPANS
from rl_bridge.rollout.task import REPORT_FILE, Task, load_tasks, to_floats
from rl_bridge.services.hosts import Hosts
from rl_bridge.trainer.checkpoints import newest_checkpoint

INTERRUPTED_STATUS = 130


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
        _prepare_folder(stack, folder, config, resume=resume)
        return _train(config, folder, resume=resume)


def _train(config: Config, folder: Path, *, resume: bool) -> int:
    console = Console()
    try:
        completed = asyncio.run(_run_session(config, folder, console=console, resume=resume))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(_describe_interruption(config, folder), highlight=False, soft_wrap=True)
        return INTERRUPTED_STATUS
    except Exception:
        if not resume and not (folder / LOGS).exists():
            # Nothing was started: free the name for the next attempt.
            shutil.rmtree(folder, ignore_errors=True)
        raise
    console.print(
        _describe_next_steps(config, folder) if completed else _describe_interruption(config, folder),
        highlight=False,
        soft_wrap=True,
    )
    return 0 if completed else INTERRUPTED_STATUS


def _prepare_folder(stack: ExitStack, folder: Path, config: Config, *, resume: bool) -> None:
    """Lock the folder until the stack is closed; write the configuration of a new run into it."""
    with _convert_folder_errors(folder):
        if not resume:
            _require_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock_folder(folder))
        if not resume:
            _require_unused(folder)  # again: another run may have started here before the lock
            try:
                save_config(config, folder)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)  # nothing else is in it
                raise
        elif (trained_iterations := newest_checkpoint(folder)) > config.trainer.iterations:
            raise ConfigError(
                f"expected trainer.iterations of at least {trained_iterations}, which the run has behind it, "
                f"got {config.trainer.iterations}"
            )


def _require_unused(folder: Path) -> None:
    if not is_unused(folder):
        raise make_folder_exists_error(folder)


@contextlib.contextmanager
def _convert_folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run's folder {str(folder)!r}: {error.strerror}; "
            "see that there is room, and that it is yours to write to"
        ) from error


def _describe_next_steps(config: Config, folder: Path) -> str:
    """Return a message with the policy's path, and commands for the next steps."""
    steps = {
        f"ropewalk rollouts {folder}": "read what was played",
        f"tensorboard --logdir {config.output_dir}": "see the metrics",
        f"ropewalk train --resume {folder} trainer.iterations={2 * config.trainer.iterations}": "train on",
    }
    width = max(map(len, steps)) + 3
    lines = [f"  {command:<{width}}{reason}" for command, reason in steps.items()]
    return "\n".join([f"the policy is in {folder / 'policy'}, and everything else beside it; next:", *lines])


def _describe_interruption(config: Config, folder: Path) -> str:
    if not config.trainer.checkpoint_interval:
        return "interrupted; trainer.checkpoint_interval is 0, so no checkpoint was kept"
    if not (newest := newest_checkpoint(folder)):
        return "interrupted before the first checkpoint"
    return f"interrupted; go on after iteration {newest} with: ropewalk train --resume {folder}"


def _handle_sigterm() -> list[Callable[[], object]]:
    """Handle SIGTERM; return its callbacks, each called once, last first. The first one cancels, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    callbacks: list[Callable[[], object]] = [task.cancel]

    def on_sigterm() -> None:
        if callbacks:
            callbacks.pop()()

    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    return callbacks


async def _run_session(config: Config, folder: Path, *, console: Console, resume: bool) -> bool:
    """Run to the end; return False if the run was preempted."""
    sigterm_callbacks = _handle_sigterm()
    async with open_run(config, folder, console=console, resume=resume) as (run, fleet):
        if resume:
            # Only now: the next `--resume` must not pick up a configuration that cannot be started.
            with _convert_folder_errors(folder):
                save_config(config, folder)
        PROCESS_SPANS.mark_started()
        if config.rollout.checkpoint_on_preemption:
            sigterm_callbacks.append(run.preempt)
        try:
            if not await fleet.guard(train_with_recovery(run)) or run.preempted:
                return False
        except Exception as failure:
            await _keep_checkpoint(run, failure)
            raise
        # Everything is in the last checkpoint: from now on SIGTERM cancels at once.
        del sigterm_callbacks[1:]
        await fleet.guard(_report(run))
        return True


async def _keep_checkpoint(run: Run, failure: Exception) -> None:
    """Wait for the checkpoint being written: the end gives a trainer seconds, and a large one takes minutes."""
    failed_itself = isinstance(failure, CheckpointError)
    if not failed_itself and newest_checkpoint(run.folder) < run.checkpoint_begun:
        text = f"{failure}\nthe checkpoint of iteration {run.checkpoint_begun} is still being written; waiting for it"
        run.console.print(text, markup=False, highlight=False, soft_wrap=True)
        await run.wait_for_checkpoint()


async def _report(run: Run) -> None:
    folder = run.folder / "evaluation"
    results = await evaluate(run, folder, version=run.version)
    reports = summaries_of(run.config, results)
    if any(results.values()):
        EvaluationFolder(folder).finish(_combine_reports(results, reports))
    with convert_write_errors(run.folder, "the report"):
        for name, task in run.tasks.items():
            await task.report(run.chat, result_of(results[name], train_seconds=run.train_seconds))
        if "" not in results:
            report = _combine_reports(results, reports)
            (run.folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def evaluate_run(config: Config, folder: Path, *, resume: bool = False) -> None:
    """Play `evaluation.episodes` held-out episodes as a run does; print a report, and write it to the folder.

    Nothing is trained: there is no trainer, and the generators have all the GPUs they need. The folder gets the report
    and the logs, and is removed if nothing was started; `resume` continues its evaluation. Ctrl-C and SIGTERM raise
    KeyboardInterrupt.
    """
    model_path = require_policy_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=resume)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {str(folder)!r}: {error.strerror}; --name chooses another"
        ) from error
    try:
        asyncio.run(_run_evaluation(config, model_path, folder, Console()))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if (folder / RECORDS_FILE).exists() and not (folder / FIGURES_FILE).exists():
            _print(Console(stderr=True), f"continue it with: ropewalk eval --resume {folder}")
        if not (folder / LOGS).exists():
            with contextlib.suppress(OSError):  # not empty: the task has written something
                folder.rmdir()


async def _run_evaluation(config: Config, model_path: Path, folder: Path, console: Console) -> None:
    _handle_sigterm()
    tasks = load_tasks(config, folder)
    unused_buffer = ReplayBuffer(
        Ledger(max_losses=None),
        Admission(groups_per_batch=1, max_staleness=0, iterations=0),
        timeout_s=1.0,
    )
    async with open_players(
        config, folder, model_path=model_path, buffer=unused_buffer, trains=False, console=console
    ) as players:
        save_config(config, folder)
        names = ", ".join(str(task.config.rollout.task) for task in tasks.values())
        _print(console, f"{config.evaluation.episodes:,} held-out episodes of {names}")
        results, probes = await players.fleet.guard(_play(players, tasks, folder))
    summaries = summaries_of(config, results)
    reports = {name: summary | {"probe": probes[name]} for name, summary in summaries.items()}
    report = _combine_reports(results, reports)
    console.print_json(data=report)
    for name, summary in reports.items():
        for warning in warnings_of(summary):
            _print(console, f"{name}: {warning}" if name else warning)
    EvaluationFolder(folder).finish(report)
    _print(console, f"written to {folder}")


async def _play(
    players: Players, tasks: Mapping[str, Task], folder: Path
) -> tuple[dict[str, list[EpisodeRecord]], dict[str, dict[str, float]]]:
    results = await evaluate(players, folder)
    summary = summary_of(results)
    if not summary["episodes"]:
        raise RolloutError(
            f"none of {players.config.evaluation.episodes} held-out episodes could be played, the last one because: "
            f"{summary['last_absence']}"
        )
    return results, {name: to_floats(await task.probe(players.chat), "probe") for name, task in tasks.items()}


def _combine_reports(
    results: Mapping[str, list[EpisodeRecord]], reports: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    return reports[""] if "" in reports else summary_of(results) | {"environments": reports}


def _print(console: Console, text: str) -> None:
    console.print(to_plain_text(text, 1000), markup=False, highlight=False, soft_wrap=True)
