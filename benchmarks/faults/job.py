"""A small training run of the example in its own processes, whose status can be polled."""

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from rl_bridge.errors import StatusError
from rl_bridge.loops.run import HISTORY_FILE
from rl_bridge.metrics.status import StatusSnapshot, read_served_address, request_status

CONFIG = "examples/grpo_blackjack/config.yaml"
RUN_MARK_VARIABLE = "ROPEWALK_FAULTS_RUN"
EXIT_TIMEOUT_S = 60.0

SMALL = (
    *("rollout.batch_size=256", "env.sessions=64", "env.restarts=40", "rollout.num_workers=2"),
    *("monarch.roles.policy.replicas=2", "monarch.restarts.budget=40", "monarch.restarts.max_backoff_s=1"),
    *("evaluation.interval=0", "evaluation.episodes=256", "trainer.checkpoint_interval=5"),
)
"""Two replicas of each service that can lose one, and a restart budget for the kills."""


class Job:
    """One run of `ropewalk train`.

    Args:
        root: A checkout.
        folder: Where the run writes.
        overrides: Configuration overrides in addition to `SMALL`.
        resume: Resume the run in the folder; without overrides.
    """

    def __init__(self, root: Path, folder: Path, *overrides: str, resume: bool = False) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._log = (folder.parent / f"{folder.name}.log").open("ab")
        command = [sys.executable, "-m", "openenv_core.cli", "train"]
        new_run_arguments = ["--config", CONFIG, "--name", folder.name, f"output_dir={folder.parent}", *SMALL]
        self.process = subprocess.Popen(
            [*command, *(["--resume", str(folder)] if resume else new_run_arguments), *overrides],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, RUN_MARK_VARIABLE: self._mark, "COLUMNS": "200"},
        )

    def output(self) -> str:
        """Return the command's output so far."""
        return Path(self._log.name).read_text(errors="replace")

    def status(self) -> StatusSnapshot | None:
        """Return the status of the run; None before its first and after its end."""
        try:
            served = read_served_address(self.folder)
            return None if served is None else asyncio.run(request_status(served[0]))
        except (OSError, StatusError):
            return None

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the run; returns its exit status, or None if it is still running."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def find_processes(self) -> list[psutil.Process]:
        """Return every living process of the run, reparented ones included."""
        processes = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(RUN_MARK_VARIABLE) == self._mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except psutil.Error:
                continue
        return processes

    def find_leftovers(self) -> list[psutil.Process]:
        """Return the processes that are left after a grace period."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while (leftovers := self.find_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return leftovers

    def rows(self, file: str) -> list[dict[str, Any]]:
        """Return the rows of a file of JSON lines in the run's folder."""
        return [json.loads(line) for line in (self.folder / file).read_text().splitlines()]

    def trained(self) -> list[int]:
        """Return the groups trained in the history that led to the weights, in order."""
        return [group for row in self.rows(HISTORY_FILE) for group in row["trained"]]

    def close(self) -> None:
        """Kill every process of the run."""
        for process in self.find_processes():
            process.kill()
        self.process.wait()
        self._log.close()
