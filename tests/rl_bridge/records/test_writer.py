"""Records of a run's rollouts: whole groups, within a bound, each once."""

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from rl_bridge.config.sections import RecordsConfig
from rl_bridge.records import SEGMENTS, RolloutRecords, TrajectoryRecord, list_segment_files, read_lines
from rl_bridge.types import Group
from tests.rl_bridge.records.records_fixtures import decode, group, write


def read_records(folder: Path) -> list[TrajectoryRecord]:
    return [TrajectoryRecord.model_validate_json(line) for line in read_lines(folder)]


def writer(folder: Path, *, groups: int = 2, max_mb: int = 1) -> RolloutRecords:
    return RolloutRecords(folder, decode, RecordsConfig(groups=groups, max_mb=max_mb))


def batch(*, first: int = 0, groups: int = 8) -> list[Group]:
    return [group(first + number, 1.0, -1.0, 0.5) for number in range(groups)]


def test_groups_are_kept_whole_with_their_own_rows(tmp_path: Path) -> None:
    groups = batch()
    write(writer(tmp_path), 1, groups)
    records = read_records(tmp_path)
    assert len(records) == 6
    assert list(Counter(r.group for r in records).values()) == [3, 3]
    assert [r.sibling for r in records] == [0, 1, 2] * 2
    for record in records:
        # `write` gives every trajectory its own reward as its advantage.
        assert record.advantage == record.reward == (1.0, -1.0, 0.5)[record.sibling]
        assert record.turns[0].context == f"deal {record.group}?"
        assert record.iteration == 1


def test_small_iteration_is_kept_whole_and_none_if_disabled(tmp_path: Path) -> None:
    groups = batch(groups=1)
    write(writer(tmp_path, groups=0), 1, groups)
    assert not (tmp_path / "rollouts").exists()
    write(writer(tmp_path, groups=5), 1, groups)
    assert len(read_records(tmp_path)) == 3


def fill(record: RolloutRecords, iterations: range, *, size: int = 20_000) -> None:
    for iteration in iterations:
        groups = [group(iteration, 1.0, 0.0, text="x" * (size // 40))]
        write(record, iteration, groups)


def test_first_and_newest_stay_within_the_bound(tmp_path: Path) -> None:
    record = writer(tmp_path)
    fill(record, range(1, 200))
    files = list_segment_files(tmp_path)
    assert len(files) == SEGMENTS
    assert sum(path.stat().st_size for path in files) <= 1 << 20
    iterations = [r.iteration for r in read_records(tmp_path)][::2]
    assert iterations == sorted(iterations)
    assert iterations[0] == 1
    assert iterations[-1] == 199
    # One gap, between the first file and the newest ones.
    gaps = [b - a for a, b in pairwise(iterations) if b - a != 1]
    assert len(gaps) == 1
    assert int(files[0].stem) == 1
    assert int(files[1].stem) > 2


def test_too_large_group_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = writer(tmp_path)
    with caplog.at_level(logging.WARNING):
        fill(record, range(1, 4), size=1 << 20)
        fill(record, range(4, 5))
    assert [r.iteration for r in read_records(tmp_path)] == [4, 4]
    (message,) = caplog.messages
    assert "raise records.max_mb" in message


def test_rewound_run_keeps_what_its_history_has(tmp_path: Path) -> None:
    record = writer(tmp_path)
    fill(record, range(1, 30))
    files = len(list_segment_files(tmp_path))
    record.rewind(12)
    assert [r.iteration for r in read_records(tmp_path)] == [i for i in range(1, 13) for _ in "ab"]
    assert len(list_segment_files(tmp_path)) < files
    fill(record, range(13, 15))
    assert [r.iteration for r in read_records(tmp_path)][-4:] == [13, 13, 14, 14]
    record.rewind(0)
    assert list_segment_files(tmp_path) == []


def test_line_that_was_cut_off_within_a_character_goes(tmp_path: Path) -> None:
    record = writer(tmp_path)
    groups = [group(1, 1.0, text="plain"), group(2, 1.0, text="€")]
    write(record, 1, groups)
    (file,) = list_segment_files(tmp_path)
    written = file.read_bytes()
    file.write_bytes(written[: written.index("€".encode()) + 1])
    record.rewind(1)
    assert len(read_records(tmp_path)) == written[: written.index("€".encode())].count(b"\n")
