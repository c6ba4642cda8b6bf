"""A resumed run trains some iterations again; the log has each of them once."""

import errno
import json
import os
from pathlib import Path

import pytest

from rl_bridge.errors import CheckpointError
from rl_bridge.metrics.sinks import JsonlSink, MetricsLog, TensorBoardSink, last_row, rewind


def write(path: Path, *iterations: int) -> None:
    sink = JsonlSink(path)
    for iteration in iterations:
        sink.write(iteration, {"time/elapsed_s": iteration / 2})
        # Read before closing: a run that is killed keeps what it has measured.
        assert json.loads(path.read_text().splitlines()[-1])["iteration"] == iteration
    sink.close()


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("checkpoint", "left"), [(0, []), (2, [1, 2])])
def test_rows_after_the_checkpoint_are_removed(tmp_path: Path, checkpoint: int, left: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)
    last = rewind(path, checkpoint)
    assert last == ({"iteration": left[-1], "time/elapsed_s": left[-1] / 2} if left else {})
    write(path, checkpoint + 1)
    assert iterations(path) == [*left, checkpoint + 1]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_line_that_was_cut_off_by_a_kill_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    path.write_text(path.read_text()[:-9])
    assert rewind(path, 2)["iteration"] == 1
    write(path, 2)
    assert iterations(path) == [1, 2]


def test_a_log_of_weeks_is_looked_at_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = b'{"iteration": 7, "reward/mean": 0.5}\n'
    with path.open("wb") as file:
        file.truncate(1 << 34)  # bytes that nobody could read through
        file.seek(0, os.SEEK_END)
        file.writelines([b"\n", row, b'{"iteration": 8}\n', b'{"itera'])
    assert last_row(path)["iteration"] == 8
    assert rewind(path, 7)["reward/mean"] == 0.5
    assert path.stat().st_size == (1 << 34) + 1 + len(row)


def test_sinks_drop_rows_that_are_trained_again(tmp_path: Path) -> None:
    with MetricsLog([JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path)]) as log:
        for step in (1, 2, 3):
            log.write(step, {"reward/mean": float(step)})
        log.rewind(1)
        log.write(2, {"reward/mean": 20.0})
    # Takes long to import, and each worker imports this file.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 1.0), (2, 20.0)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["iteration"], row["reward/mean"]) for row in rows] == [(1, 1.0), (2, 20.0)]


def test_full_disk_hides_no_error_that_has_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = TensorBoardSink(tmp_path)

    def close_on_full_disk() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail() -> None:
        with MetricsLog([sink]):
            raise CheckpointError("there is no room")

    with monkeypatch.context() as patch:
        patch.setattr(sink._writer, "close", close_on_full_disk)
        with pytest.raises(CheckpointError, match="there is no room"):
            fail()
    sink.close()
