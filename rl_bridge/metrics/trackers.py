"""Metrics to services that keep track of experiments: Weights & Biases, and Trackio. Their packages are extras."""

import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rl_bridge.errors import ConfigError

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S: Final = 60.0
"""How long the end of a run waits for what is not uploaded yet. It stays in the run's folder."""


class TrackerSink(ABC):
    """Hands metrics to a tracker, whose steps only ever go up.

    What a tracker has it keeps: iterations that are trained again after a loss keep the metrics that they had first.
    What goes wrong with it on the way is told once, and the training goes on.

    Args:
        folder: The run's. It has a file with the id of the tracker's run, by which a resumed run goes on with it.
        project: The tracker's project.
        config: What the run was asked for, as JSON has it.
    """

    name: str
    """Of the package, and of the sink."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self._state = folder / f"{self.name}.json"
        known = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._id, self._last = known.get("id", secrets.token_hex(4)), known.get("iteration", 0)
        self._is_broken = False
        try:
            self._run = self._begin(folder.absolute(), project, config, resumes=bool(known))
        except Exception as error:
            raise ConfigError(
                f"metrics.sinks: {self.name} cannot begin a run: {error}; {self._remedy}"
            ) from error
        self._save()

    _remedy: str

    @abstractmethod
    def _begin(self, folder: Path, project: str, config: Mapping[str, Any], *, resumes: bool) -> Any:
        """Begin a run, or go on with the one that is known."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an iteration, unless the tracker has some of it already."""
        if iteration <= self._last or self._is_broken:
            return
        try:
            self._run.log(dict(metrics), step=iteration)
        except Exception as error:
            self._is_broken = True
            logger.warning("%s takes no metrics any more; metrics.jsonl has them: %s", self.name, error)
            return
        self._last = iteration
        self._save()

    def rewind(self, iteration: int) -> None:
        """Do nothing: a tracker does not forget."""
        return

    def close(self, *, failed: bool = False) -> None:
        """Finish the tracker's run."""
        try:
            self._finish(failed)
        except Exception as error:
            logger.warning("the run of %s could not be finished: %s", self.name, error)

    def _finish(self, failed: bool) -> None:
        self._run.finish()

    def _save(self) -> None:
        partial = self._state.with_suffix(".partial")
        partial.write_text(json.dumps({"id": self._id, "iteration": self._last}) + "\n")
        partial.replace(self._state)


class WandbSink(TrackerSink):
    """Weights & Biases. Its own variables count, such as WANDB_MODE=offline, WANDB_ENTITY and WANDB_API_KEY."""

    name = "wandb"
    _remedy = "log in by `wandb login`, or set WANDB_MODE=offline and `wandb sync` the run later"

    def _begin(self, folder: Path, project: str, config: Mapping[str, Any], *, resumes: bool) -> Any:
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

    def _begin(self, folder: Path, project: str, config: Mapping[str, Any], *, resumes: bool) -> Any:
        import trackio

        # It goes on with a run by its name, so the name says which of several runs of one name this is.
        name = f"{folder.name}-{self._id}"
        return trackio.init(
            project=project,
            name=name,
            config=dict(config),
            resume="allow" if resumes else "never",
            embed=False,
        )


TRACKERS: Final = {sink.name: sink for sink in (WandbSink, TrackioSink)}
