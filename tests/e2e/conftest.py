"""Runs of the `ropewalk` command, observed from outside."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
CONFIG = "examples/grpo_blackjack/config.yaml"
MARK = "ROPEWALK_TEST_RUN"
GONE_WITHIN_S = 60.0

SMALL = (
    "trainer.iterations=2",
    "rollout.batch_size=64",
    "env.sessions=16",
    "evaluation.episodes=64",
    "trainer.checkpoint_interval=1",
)
"""Overrides that make a run short."""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's iterations."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Watched:
    """A command in its own process session, whose descendants are found by an environment variable."""

    def __init__(self, command: Sequence[str], output: Path, **variables: str) -> None:
        self._mark = uuid.uuid4().hex
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **variables, MARK: self._mark, "COLUMNS": "200"},
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:g} s:\n{self.output()[-3000:]}")

    def wait_for(self, text: str, timeout_s: float = 400.0) -> None:
        self.until(lambda: text in self.output(), f"expected {text!r} in the output", timeout_s)

    def until(self, condition: Callable[[], object], message: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{message}; status {self.process.poll()}:\n{self.output()[-3000:]}")
            time.sleep(0.1)

    def alive(self) -> list[psutil.Process]:
        """Return every living process with the mark, reparented ones included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def role(self, name: str) -> psutil.Process:
        """Return the process of a role, by the log named in its environment."""
        for process in self.alive():
            if process.environ().get("ROPEWALK_ROLE_LOG", "").endswith(f"{name}.log"):
                return process
        pytest.fail(f"no process of the role {name!r} among {self.alive()}")

    def wait_gone(self) -> None:
        """Wait until every process has ended."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.alive() == []

    def kill_all(self) -> None:
        for process in self.alive():
            process.kill()
        self.process.wait()


def lose_a_generator_and_end(run: Watched, folder: Path, end: Callable[[], None]) -> None:
    """Kill a run's generator after the second iteration, wait until it has trained with another, and interrupt it.

    Args:
        run: A run with `trainer.checkpoint_interval=1`.
        folder: The run's folder.
        end: Interrupts the run.
    """
    run.wait_for("   2/")
    killed = run.role("policy-0")
    killed.kill()
    run.until(lambda: not killed.is_running(), "the generator's process is still there", 60)
    before = len(rows(folder))
    run.until(lambda: len(rows(folder)) >= before + 3, "no iterations after the kill", 200)
    end()
    assert run.wait(200) == 130
    assert f"--resume {folder.parent}" in run.output()


def assert_went_on(again: Watched, trained: int) -> None:
    """Assert that a resumed run continued after the last iteration, or the one before: the signal may have come between
    an iteration's line in the log and its checkpoint."""
    output = again.output()
    assert any(f"resuming after iteration {version}\n" in output for version in (trained - 1, trained))


@contextlib.contextmanager
def own_shared_memory() -> Iterator[tuple[list[str], Path]]:
    """Create a mount namespace with its own /dev/shm; yields the prefix of commands to run in it, and the folder.

    Files in the machine's /dev/shm may belong to other programs.
    """
    inside = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec sleep infinity"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "ready\n", "expected that user namespaces may be made here"
            enter = ["nsenter", "--target", str(keeper.pid), "--user", "--mount", "--preserve-credentials"]
            yield [*enter, f"--wdns={ROOT}"], Path(f"/proc/{keeper.pid}/root/dev/shm")
        finally:
            keeper.kill()


@pytest.fixture
def ropewalk(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Starts `ropewalk WORDS`, and asserts at the end that nothing is left: processes (hence ports), shared memory,
    temporary files."""
    started: list[Watched] = []
    with own_shared_memory() as (enter, shared_memory), tempfile.TemporaryDirectory(prefix="e2e-") as scratch:

        def start(*words: str) -> Watched:
            output = tmp_path / f"output-{len(started)}.txt"
            command = [*enter, sys.executable, "-m", "openenv_core.cli", *words]
            watched = Watched(command, output, TMPDIR=scratch)
            started.append(watched)
            return watched

        yield start
        try:
            for watched in started:
                watched.wait_gone()
            assert list(shared_memory.iterdir()) == []
            if all(watched.process.returncode != -9 for watched in started):
                assert list(Path(scratch).glob("ropewalk-*")) == []
        finally:
            for watched in started:
                watched.kill_all()
