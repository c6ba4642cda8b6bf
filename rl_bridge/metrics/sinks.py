"""Sinks of each iteration's metrics: a line on the console, JSON lines, TensorBoard, optional trackers."""

import contextlib
import json
import logging
import mmap
import os
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rl_bridge.errors import ConfigError
from rl_bridge.files import replace_file


class Sink(Protocol):
    """Takes the metrics of one iteration at a time."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one iteration."""
        ...

    def rewind(self, iteration: int) -> None:
        """Remove what came after an iteration, which is trained again."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Flush and close; `failed` is whether the run failed."""
        ...


class JsonlSink:
    """Writes one JSON object per line: `iteration`, then the metrics by name. A resumed run continues its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append a line, and flush it so that a killed run keeps its metrics."""
        self._file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
        self._file.flush()

    def rewind(self, iteration: int) -> None:
        """Remove the later lines."""
        self._file.close()
        rewind(self._path, iteration)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # of an unwritten line, which `write` has raised already
            self._file.close()


def environment_prefix(name: str) -> str:
    """Return the prefix of an environment's metrics; empty for a run's only environment."""
    return f"env/{name}/" if name else ""


class EnvironmentSink(JsonlSink):
    """Writes the rows of one of several environments as a run on it alone would have them."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._prefix = environment_prefix(name)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append the environment's metrics, and the run's metrics that it does not override."""
        shared = {name: value for name, value in metrics.items() if not name.startswith("env/")}
        own = {name: value for name, value in metrics.items() if name.startswith(self._prefix)}
        super().write(iteration, shared | {name.removeprefix(self._prefix): own[name] for name in own})


def rewind(path: Path, iteration: int) -> Mapping[str, float]:
    """Remove rows after an iteration, and a truncated one, from a file of JSON lines; returns the last row left."""
    if not path.exists():
        return {}
    end, row = _find_row(path, iteration)
    os.truncate(path, end)
    return row


def last_row(path: Path) -> Mapping[str, float]:
    """Return the last complete row of a file of JSON lines; empty if there is none."""
    return _find_row(path, sys.maxsize)[1]


def _find_row(path: Path, iteration: int) -> tuple[int, Mapping[str, float]]:
    """Return the end and the content of the last row up to an iteration. Scans from the end, as files grow large."""
    if not path.stat().st_size:
        return 0, {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            with contextlib.suppress(ValueError, TypeError, KeyError):
                row: dict[str, float] = json.loads(content[begin:end])
                if row["iteration"] <= iteration:
                    return end, row
            end = begin
    return 0, {}


class TensorBoardSink:
    """Writes event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = str(folder)
        self._make_writer: Callable[..., SummaryWriter] = SummaryWriter
        self._writer = SummaryWriter(self._folder)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def rewind(self, iteration: int) -> None:
        """Have TensorBoard purge the later iterations in earlier files."""
        self._writer.close()
        self._writer = self._make_writer(self._folder, purge_step=iteration + 1)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close; if the run failed, an error of that does not hide the run's."""
        try:
            self._writer.close()
        except OSError:
            if not failed:
                raise


class MetricsLog:
    """Passes metrics on to every sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of one iteration to every sink."""
        for sink in self._sinks:
            sink.write(iteration, metrics)

    def rewind(self, iteration: int) -> None:
        """Have every sink remove what came after an iteration."""
        for sink in self._sinks:
            sink.rewind(iteration)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as closing:  # closes all sinks even if one raises
            for sink in self._sinks:
                closing.callback(sink.close, failed=error is not None)


logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S: Final = 60.0
"""How long the end of a run waits for uploads; what is not uploaded stays in the run's folder."""


class TrackerSink(ABC):
    """Sends metrics to a tracker, whose steps only increase.

    A tracker cannot rewind: iterations that are trained again after a loss keep their first metrics. If a tracker fails
    during training, that is logged once and training continues. A file in the run's folder stores the id of the
    tracker's run, which a resumed run continues.
    """

    name: str
    """The name of the package and of the sink."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self._state_file = folder / f"{self.name}.json"
        saved = self._read_state()
        self._id, self._last_iteration = saved.get("id", secrets.token_hex(4)), saved.get("iteration", 0)
        self._is_broken = False
        try:
            self._run = self._start_run(folder.absolute(), project, config, resumes=bool(saved))
        except Exception as error:
            raise ConfigError(
                f"metrics.sinks: {self.name} cannot begin a run: {error}; {self._remedy}"
            ) from error
        self._save_state()

    _remedy: str

    @abstractmethod
    def _start_run(self, folder: Path, project: str, config: Mapping[str, Any], *, resumes: bool) -> Any:
        """Start a run, or resume the known one."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an iteration, unless the tracker has that iteration already."""
        if iteration <= self._last_iteration or self._is_broken:
            return
        try:
            self._run.log(dict(metrics), step=iteration)
        except Exception as error:
            self._is_broken = True
            logger.warning("%s no longer takes metrics; metrics.jsonl still has them: %s", self.name, error)
            return
        self._last_iteration = iteration
        self._save_state()

    def rewind(self, iteration: int) -> None:
        """Do nothing: trackers cannot rewind."""
        return

    def close(self, *, failed: bool = False) -> None:
        """Finish the tracker's run."""
        try:
            self._finish(failed)
        except Exception as error:
            logger.warning("the run of %s could not be finished: %s", self.name, error)

    def _finish(self, failed: bool) -> None:
        self._run.finish()

    def _read_state(self) -> Mapping[str, Any]:
        """Return the state of an earlier start; empty if there is none, or only what a crash of the machine left."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            saved: dict[str, Any] = json.loads(self._state_file.read_text())
            return saved
        return {}

    def _save_state(self) -> None:
        text = json.dumps({"id": self._id, "iteration": self._last_iteration}) + "\n"
        replace_file(self._state_file, text.encode())


class WandbSink(TrackerSink):
    """Weights & Biases. Its environment variables apply: WANDB_MODE=offline, WANDB_ENTITY, WANDB_API_KEY etc."""

    name = "wandb"
    _remedy = "log in by `wandb login`, or set WANDB_MODE=offline and `wandb sync` the run later"

    def _start_run(self, folder: Path, project: str, config: Mapping[str, Any], *, resumes: bool) -> Any:
        import wandb

        return wandb.init(
            project=project,
            name=folder.name,
            id=self._id,
            resume="allow",
            config=dict(config),
            dir=folder,
            settings=wandb.Settings(finish_timeout=FINISH_TIMEOUT_S, console="off"),
        )

    def _finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioSink(TrackerSink):
    """Trackio. Without TRACKIO_SPACE_ID or TRACKIO_SERVER_URL it is local, below TRACKIO_DIR."""

    name = "trackio"
    _remedy = "see TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and TRACKIO_DIR"

    def _start_run(self, folder: Path, project: str, config: Mapping[str, Any], *, resumes: bool) -> Any:
        import trackio

        # Trackio resumes runs by name, so the id tells several runs of one name apart.
        name = f"{folder.name}-{self._id}"
        return trackio.init(
            project=project,
            name=name,
            config=dict(config),
            resume="allow" if resumes else "never",
            embed=False,
        )


TRACKERS: Final = {sink.name: sink for sink in (WandbSink, TrackioSink)}


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", "+.3f"),
    ("policy/entropy", "entropy", ".3f"),
    ("rollout/ending/illegal_answer", "illegal", ".1%"),
    ("rollout/ending/failed_environment", "failed", ".1%"),
    ("rollout/episodes_retried", "retried", ".0f"),
    ("rollout/zero_variance_share", "zero-var", ".0%"),
    ("policy/kl_to_reference", "kl", ".4f"),
    ("mismatch/logprob_max", "mismatch", ".0e"),
    ("train/grad_norm", "grad", ".2f"),
    ("time/rollout_s", "roll", ".2f"),
    ("time/train_s", "train", ".2f"),
    ("time/sync_s", "sync", ".2f"),
)
"""(metric, heading, format). Metrics that an iteration lacks are omitted from its line."""
HIDDEN_IF_ZERO: frozenset[str] = frozenset({"rollout/ending/failed_environment", "rollout/episodes_retried"})
"""Metrics omitted if 0. Retries are counted since the run began."""


def format_iteration(
    iteration: int, iterations: int, metrics: Mapping[str, float], *, remaining_s: float
) -> str:
    """Return the console line of one iteration; `remaining_s` is an estimate."""
    cells = [
        f"{heading} {metrics[name]:{format_spec}}"
        for name, heading, format_spec in COLUMNS
        if name in metrics and (metrics[name] or name not in HIDDEN_IF_ZERO)
    ]
    environments = [
        f"{match[1]} {value:+.3f}"
        for name, value in metrics.items()
        if (match := re.fullmatch("env/(.*)/reward/mean", name))
    ]
    probes = [
        f"{name.removeprefix('env/').replace('probe/', '', 1)} {value:+.4f}"
        for name, value in metrics.items()
        if name.startswith("probe/") or (name.startswith("env/") and "/probe/" in name)
    ]
    minutes, seconds = divmod(round(remaining_s), 60)
    remaining = f"{minutes}:{seconds:02d} left"
    return "  ".join([f"{iteration:>4}/{iterations}", *cells, *environments, *probes, remaining])
