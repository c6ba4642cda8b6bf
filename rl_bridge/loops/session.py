"""One run from beginning to end: start everything, train, evaluate, report, stop everything."""

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from rl_bridge.config import Config, folder_exists, save_config
from rl_bridge.errors import ConfigError
from rl_bridge.loops.assembly import LOGS, open_run
from rl_bridge.loops.evaluation import evaluate
from rl_bridge.loops.folder_lock import folder_of_ones_own, is_unused
from rl_bridge.loops.recovery import train_to_the_end
from rl_bridge.loops.run import Run
from rl_bridge.metrics import PROCESS_SPANS
from rl_bridge.trainer.checkpoints import newest_checkpoint

INTERRUPTED = 130


def train_run(config: Config, folder: Path, *, resume: bool) -> int:
    """Train, evaluate and report.

    Args:
        config: The run.
        folder: Where it writes; made where it is missing.
        resume: Go on from the newest checkpoint in the folder.

    Returns:
        0, or 130 where the run was interrupted. Either way nothing is left running.

    Raises:
        rl_bridge.errors.RunInUseError: Another process writes to the folder.
        rl_bridge.errors.BridgeError: The run failed.
    """
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
            # Nothing was started: the next attempt may have the name.
            shutil.rmtree(folder, ignore_errors=True)
        raise
    console.print(
        _next_steps(config, folder) if whole else _interrupted(config, folder),
        highlight=False,
        soft_wrap=True,
    )
    return 0 if whole else INTERRUPTED


def _open(stack: ExitStack, folder: Path, config: Config, *, resume: bool) -> None:
    """Have the folder to oneself until the stack is closed; a new run's configuration is there from then on."""
    with _writing_to(folder):
        if not resume:
            _require_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(folder_of_ones_own(folder))
        if resume:
            _require_no_more_trained(folder, config)
        else:
            _require_unused(folder)  # somebody may have begun a run here before it was ours
            _begin(config, folder)


def _require_unused(folder: Path) -> None:
    if not is_unused(folder):
        raise folder_exists(folder)


def _require_no_more_trained(folder: Path, config: Config) -> None:
    if (trained := newest_checkpoint(folder)) > config.trainer.iterations:
        raise ConfigError(
            f"expected trainer.iterations of at least {trained}, which the run has behind it, "
            f"got {config.trainer.iterations}"
        )


def _begin(config: Config, folder: Path) -> None:
    try:
        save_config(config, folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)  # nothing else is in it
        raise


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
    """Where everything is, and what may be done with it."""
    steps = {
        f"ropewalk rollouts {folder}": "read what was played",
        f"tensorboard --logdir {config.output_dir}": "see the figures",
        f"ropewalk train --resume {folder} trainer.iterations={2 * config.trainer.iterations}": "train on",
    }
    width = max(map(len, steps)) + 3
    lines = [f"  {command:<{width}}{why}" for command, why in steps.items()]
    return "\n".join([f"the policy is in {folder / 'policy'}, and everything else beside it; next:", *lines])


def _interrupted(config: Config, folder: Path) -> str:
    if not config.trainer.checkpoint_interval:
        return "interrupted; trainer.checkpoint_interval is 0, so no checkpoint was kept"
    if not newest_checkpoint(folder):
        return "interrupted before the first checkpoint"
    return f"interrupted; go on with: ropewalk train --resume {folder}"


async def _session(config: Config, folder: Path, *, console: Console, resume: bool) -> bool:
    """Run to the end; False where the run was told to go before."""
    # asyncio cancels its main task on Ctrl-C; a polite kill shall end a run as orderly.
    current = asyncio.current_task()
    assert current is not None
    terminated: list[Callable[[], object]] = [current.cancel]

    def on_sigterm() -> None:
        if terminated:
            terminated.pop()()

    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    async with open_run(config, folder, console=console, resume=resume) as (run, fleet):
        if resume:
            # Not before: what cannot be started shall not be what the next `--resume` goes on with.
            with _writing_to(folder):
                save_config(config, folder)
        PROCESS_SPANS.started()
        if config.rollout.checkpoint_on_preemption:
            terminated.append(run.preempt)
        if not await fleet.guard(train_to_the_end(run)):
            return False
        # Everything is in the last checkpoint: who is told to go from now on goes at once.
        del terminated[1:]
        await fleet.guard(_look(run))
        return True


async def _look(run: Run) -> None:
    await run.task.report(run.chat, await evaluate(run))
