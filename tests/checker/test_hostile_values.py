"""What is sent to a server that is ill-treated."""

import json
from collections.abc import Iterator
from typing import Any

import gallery
import pytest

from openenv_core.checker.hostile.values import RAW, frame, split
from openenv_core.checker.subject import Subject


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with Subject.of(gallery.build(tmp_path_factory.mktemp("hostile"))) as subject:
        yield subject


@pytest.fixture(scope="module")
def values(good: Subject) -> tuple[list[Any], list[Any]]:
    return split(good)


def test_what_the_schema_allows_reaches_its_ends(values: tuple[list[Any], list[Any]]) -> None:
    valid, _ = values
    numbers = [one["number"] for one in valid]
    notes = [one.get("note", "-") for one in valid]
    assert max(numbers) >= 2**64
    assert min(numbers) <= -(2**63)
    assert 0 in numbers
    assert "" in notes
    assert max(len(note) for note in notes) >= 1 << 20


def test_what_it_does_not_allow_is_wrong_in_many_ways(values: tuple[list[Any], list[Any]]) -> None:
    _, invalid = values
    numbers = [type(one.get("number")) for one in invalid if isinstance(one, dict)]
    assert {str, list, dict, bool, float, type(None)} <= set(numbers)
    assert {} in invalid
    assert any("no_such_key" in one for one in invalid)


def test_no_action_is_in_both(values: tuple[list[Any], list[Any]]) -> None:
    valid, invalid = ({json.dumps(one) for one in part} for part in values)
    assert valid
    assert invalid
    assert not valid & invalid


def test_the_same_ones_come_each_time(good: Subject) -> None:
    runs = []
    for _ in range(2):
        with Subject.of(good.url) as subject:
            runs.append(json.dumps(split(subject)))
    assert runs[0] == runs[1]


def test_frames_are_text_that_any_client_could_send() -> None:
    for raw in RAW:
        raw.decode("utf-8")
    assert json.loads(frame({"x": "\ud800"}))["data"] == {"x": "\ud800"}
