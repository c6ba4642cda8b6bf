"""Checkpoints are complete or absent, through kills and full disks; a resumed run equals an uninterrupted one."""

import contextlib
import errno
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import WAIT_S, RankDiedError, Ranks, alone, assert_close, batch, copied, ranks, settings

from rl_bridge.errors import CheckpointError, ModelError, NonFiniteLossError, RankLostError, TrainingError
from rl_bridge.trainer.checkpoints import newest_checkpoint
from rl_bridge.trainer.settings import ResumeState

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

OPTIONS: dict[str, Any] = {
    "updates_per_iteration": 3,
    "warmup_updates": 4,
    "decay_fraction": 0.5,
    "iterations": 8,
    "algorithm": {"entropy_coef": 0.1, "entropy_hold": 0.2, "entropy_final_factor": 0.0},
    "deterministic": True,
}
RUN_STATE = {"ledger": {"3": "leased"}, "cursor": [1, 2]}


@pytest.fixture
def trainer(policy: Path, tmp_path: Path) -> Any:
    return alone(policy, tmp_path, **OPTIONS)


def whole(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def test_two_are_kept_the_same_version_is_replaced_and_a_half_written_one_is_swept(
    trainer: Any, policy: Path, tmp_path: Path
) -> None:
    for number in range(4):
        trainer.step(batch(number))
        trainer.save(number + 1, {"number": number})
    trainer.save(4, {"number": "again"})
    assert whole(tmp_path) == ["step-3", "step-4"]
    shutil.copytree(tmp_path / "checkpoint" / "step-4", tmp_path / "checkpoint" / "step-5.partial")
    assert newest_checkpoint(tmp_path) == 4
    assert alone(policy, tmp_path, **OPTIONS).resume().run_state == {"number": "again"}
    assert whole(tmp_path) == ["step-3", "step-4"]


def test_an_old_one_that_somebody_still_reads_does_not_end_the_run(
    trainer: Any, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.unlink

    def unlink(path: Any, **options: Any) -> None:
        if path == "run.json":  # as NFS says of a folder with a file that is open elsewhere
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        original(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        for number in range(3):
            trainer.step(batch(number))
            trainer.save(number + 1)
        trainer.save(3)
    assert alone(policy, tmp_path, **OPTIONS).resume().version == 3
    assert whole(tmp_path) == ["step-2", "step-3"]


def test_replaced_checkpoint_stays_until_its_successor_is_complete(
    trainer: Any, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def rename(path: Path, target: Path) -> Path:
        if target.name == "step-1":
            raise Killed
        return original(path, target)

    trainer.step(batch(0))
    trainer.save(1, {"number": 1})
    original = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(Killed):
            trainer.save(1, {"number": 2})
    assert "step-1" not in whole(tmp_path)
    assert alone(policy, tmp_path, **OPTIONS).resume().run_state == {"number": 1}
    assert whole(tmp_path) == ["step-1"]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before it is set."""
    from rl_bridge.trainer import checkpoints

    released, write = threading.Event(), checkpoints.save_distributed

    def later(*arguments: Any, **options: Any) -> Any:
        assert released.wait(WAIT_S)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoints, "save_distributed", later)
    yield released
    released.set()


def test_the_training_goes_on_while_a_checkpoint_is_written(
    trainer: Any, policy: Path, tmp_path: Path, slow_disk: threading.Event
) -> None:
    straight = alone(policy, tmp_path / "straight", **OPTIONS)
    trainer.step(batch(0))
    trainer.save(1, RUN_STATE, wait=False)
    told = [trainer.step(batch(number)) for number in (1, 2)]
    assert whole(tmp_path) == ["step-1.partial"]
    assert newest_checkpoint(tmp_path) == 0
    slow_disk.set()
    trainer.save(3)  # waits for the one before
    assert whole(tmp_path) == ["step-1", "step-3"]
    # What was written first is what there was when it was asked for, to the last bit.
    shutil.rmtree(tmp_path / "checkpoint" / "step-3")
    resumed = alone(policy, tmp_path, **OPTIONS)
    assert resumed.resume() == ResumeState(version=1, run_state=RUN_STATE)
    assert [resumed.step(batch(number)) for number in (1, 2)] == told
    assert told == [straight.step(batch(number)) for number in range(3)][1:]
    assert_close(resumed.hf_state_dict(), straight.hf_state_dict())


@pytest.mark.parametrize("end", ["export", "close"])
def test_the_end_waits_for_the_last_checkpoint(
    trainer: Any, tmp_path: Path, slow_disk: threading.Event, end: str
) -> None:
    trainer.step(batch(0))
    trainer.save(1, wait=False)
    threading.Timer(0.2, slow_disk.set).start()
    trainer.export(tmp_path) if end == "export" else trainer.close()
    assert whole(tmp_path) == ["step-1"]


def test_a_checkpoint_is_waited_for_beside_other_work(
    trainer: Any, tmp_path: Path, slow_disk: threading.Event
) -> None:
    trainer.wait_for_checkpoint()  # there is none
    trainer.step(batch(0))
    trainer.save(1, wait=False)
    waiter = threading.Thread(target=trainer.wait_for_checkpoint)
    waiter.start()
    bad = batch(1)
    bad.advantages[5] = float("nan")
    with pytest.raises(NonFiniteLossError):
        trainer.step(bad)
    assert waiter.is_alive()
    slow_disk.set()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert whole(tmp_path) == ["step-1"]


def test_a_refused_checkpoint_leaves_nothing(trainer: Any, tmp_path: Path) -> None:
    trainer.step(batch(0))
    with pytest.raises(TrainingError, match="expected version 1, which the trainer is at, got 2"):
        trainer.save(2)
    for wrong in ({"tensor": object()}, {"nan": float("nan")}):
        with pytest.raises(CheckpointError, match="cannot write the checkpoint of version 1"):
            trainer.save(1, wrong)
    assert whole(tmp_path) == []


@pytest.mark.parametrize("part", ["attachments", "__1_0.distcp"])
def test_ranks_go_on_from_the_one_before_a_damaged_one(
    pair: Ranks, policy: Path, tmp_path: Path, part: str
) -> None:
    def damage(version: int) -> None:
        path = tmp_path / "checkpoint" / f"step-{version}" / part
        path.rmdir() if path.is_dir() else path.unlink()

    options = settings(policy, folder=tmp_path, **OPTIONS)
    pair.build(options)
    pair.call("step", batch(0))
    pair.call("save", 1, RUN_STATE)
    expected = pair.call("step", batch(1))
    pair.call("save", 2, {"number": 2})
    damage(2)
    pair.build(options)
    for one in pair.call("resume"):
        assert (one.version, one.run_state, len(one.damaged)) == (1, RUN_STATE, 1)
    assert pair.call("step", batch(1)) == expected  # weights, moments and schedule are those of version 1
    assert whole(tmp_path) == ["step-1", "step-2.damaged"]
    damage(1)
    pair.build(options)
    pair.ask("resume")
    for answer in pair.answers():
        assert isinstance(answer, ModelError)
        assert "cannot resume from any checkpoint of the run" in str(answer)


def test_two_ranks_resume_to_the_last_bit(pair: Ranks, policy: Path, tmp_path: Path) -> None:
    def steps(numbers: range) -> list[dict[str, float]]:
        return [pair.call("step", batch(number))[0] for number in numbers]

    options = settings(policy, folder=tmp_path, **OPTIONS)
    pair.build(options)
    assert pair.call("resume") == [ResumeState()] * 2
    expected, weights = steps(range(6)), pair.call("hf_state_dict")[0]
    pair.build(options)
    assert steps(range(3)) == expected[:3]
    pair.call("draw")
    pair.call("save", 3, RUN_STATE)
    random_numbers = pair.call("draw")
    steps(range(3, 4))
    pair.build(options)
    assert [state.version for state in pair.call("resume")] == [3, 3]
    assert pair.call("draw") == random_numbers
    assert random_numbers[0] != random_numbers[1], "each rank has a generator of its own"
    assert steps(range(3, 6)) == expected[3:]
    for state in pair.call("hf_state_dict"):
        assert_close(state, weights)


@pytest.mark.parametrize("spread", [{}, {"parallel": {"tp": 2}}], ids=["fsdp", "tensor parallel"])
def test_from_two_ranks_to_one_and_back(
    pair: Ranks, policy: Path, tmp_path: Path, spread: dict[str, Any]
) -> None:
    options = settings(policy, folder=tmp_path, **OPTIONS, **spread)
    straight = alone(policy, tmp_path / "straight", **OPTIONS)
    expected = [straight.step(batch(number)) for number in range(6)]
    pair.build(options)
    told = [pair.call("step", batch(number))[0] for number in range(2)]
    pair.call("save", 2, RUN_STATE)
    one = alone(policy, tmp_path, **OPTIONS)
    one.resume()
    told += [one.step(batch(number)) for number in range(2, 4)]
    one.save(4, RUN_STATE)
    pair.build(options)
    assert [state.version for state in pair.call("resume")] == [4, 4]
    told += [pair.call("step", batch(number))[0] for number in range(4, 6)]
    for ours, theirs in zip(told, expected, strict=True):
        ours.pop("train/valid_token_share"), theirs.pop("train/valid_token_share")
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert_close(pair.call("hf_state_dict")[0], straight.hf_state_dict(), atol=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [1, 2])
def test_killed_again_and_again_it_ends_as_if_nothing_had_been(
    policy: Path, tmp_path: Path, count: int
) -> None:
    """SIGKILL of a rank in a step, in a checkpoint, between the two; at moments and of ranks that a seed draws."""
    steps, drawn = 8, random.Random(count)
    kills = ["step 1", "save 3", "step 5", "save 6"]
    attachments = {"groups": os.urandom(64 << 20)}  # a checkpoint takes long enough to be hit
    folder = tmp_path / "killed"
    half_written: list[bool] = []
    with ranks(tmp_path, count) as undisturbed:
        undisturbed.build(settings(policy, folder=tmp_path / "straight", **OPTIONS))
        expected = [undisturbed.call("step", batch(number, rows=400))[0] for number in range(steps)]
        weights = undisturbed.call("hf_state_dict")[0]

    def killed(those: Ranks, what: str, seen: Path | None = None) -> None:
        """Kill a rank a little later, or as soon as a file is there."""
        if not kills or kills[0] != what:
            return
        kills.pop(0)
        deadline = time.monotonic() + WAIT_S
        while seen is not None and not seen.exists():
            assert time.monotonic() < deadline, f"{seen} never came"
        if seen is None:
            time.sleep(drawn.uniform(0.0, 0.05))
        those.kill(drawn.randrange(count) if seen is None else 0)
        if seen is not None:
            half_written.append(seen.exists())

    def go_on(those: Ranks) -> None:
        those.build(settings(policy, folder=folder, **OPTIONS))
        number = those.call("resume")[0].version
        assert number == newest_checkpoint(folder)
        assert number in (0, 3, 6)
        while number < steps:
            those.ask("step", batch(number, rows=400))
            killed(those, f"step {number}")
            metrics[number] = those.raised()[0]
            number += 1
            if number % 3 == 0:
                those.ask("save", number, {"number": number}, attachments, wait=False)
                partial = folder / "checkpoint" / f"step-{number}.partial"
                killed(those, f"save {number}", partial / ("run.json" if number == 3 else "__0_0.distcp"))
                those.raised()
        those.call("finish")
        assert_close(those.call("hf_state_dict")[0], weights)

    metrics: dict[int, dict[str, float]] = {}
    for _ in range(len(kills) + 1):
        with ranks(tmp_path, count) as those, contextlib.suppress(RankDiedError, RankLostError, OSError):
            go_on(those)
    assert not kills
    assert half_written[0], "the first kill in a checkpoint came too late to be one"
    assert [metrics[number] for number in range(steps)] == expected
    assert whole(folder) == ["step-3", "step-6"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("what", ["attachments", "weights"])
def test_a_full_disk_is_told_and_older_checkpoints_are_whole(
    policy: Path, small_disk: Path, tmp_path: Path, what: str
) -> None:
    trainer = alone(policy, small_disk, **OPTIONS)
    trainer.step(batch(0))
    trainer.save(1, RUN_STATE)
    saved = copied(trainer)
    trainer.step(batch(1))
    room = shutil.disk_usage(small_disk).free
    # The disk is full before the weights' turn, or in the middle of them.
    attachments = {"groups": os.urandom(room if what == "attachments" else room - 100_000)}
    with pytest.raises(
        CheckpointError, match=r"version 2 to '.*disk/checkpoint'.*[Nn]o space left.*--resume"
    ):
        trainer.save(2, RUN_STATE, attachments)
    assert whole(small_disk) == ["step-1"]
    after = alone(policy, small_disk, **OPTIONS)
    assert after.resume().version == 1
    assert_close(after.hf_state_dict(), saved)
    # With room again, the same trainer goes on.
    trainer.save(2, RUN_STATE)
    assert newest_checkpoint(small_disk) == 2


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "by the next steps"])
def test_a_full_disk_on_one_rank_is_told_to_all(
    pair: Ranks, policy: Path, small_disk: Path, wait: bool
) -> None:
    pair.build(settings(policy, folder=small_disk, **OPTIONS))
    pair.call("step", batch(0))
    pair.ask("save", 1, RUN_STATE, {"groups": os.urandom(shutil.disk_usage(small_disk).free)}, wait=wait)
    answers = pair.answers()
    deadline, version = time.monotonic() + WAIT_S, 1
    while not wait and not any(isinstance(answer, Exception) for answer in answers):
        assert time.monotonic() < deadline
        pair.ask("step", batch(version))
        answers, version = pair.answers(), version + 1
    version -= not wait  # the last one has trained nothing
    assert all(isinstance(answer, CheckpointError) for answer in answers), answers
    assert whole(small_disk) == []
    pair.call("save", version, RUN_STATE)
    pair.call("step", batch(version))
