import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from envs.code_interpreter_env.grading import InvalidTaskError, JsonlTasks, parse_task, public_view
from envs.code_interpreter_env.grading.trial import CaseInfo, reward_of
from openenv_core.errors import ConfigurationError

SECRET = "def double(n): return 2 * n  # the secret way"


def a_task(**more: Any) -> dict[str, Any]:
    public, hidden = [{"args": [1], "expected": 2}], [{"args": [77001], "expected": 154002}]
    hidden.append({"args": [{"$tuple": [3]}], "expected": None})
    task = {"id": "double", "kind": "function", "prompt": "?", "entry": "double", "reference": SECRET}
    return {**task, "public": public, "hidden": hidden, **more}


KINDS = [
    a_task(),
    {
        **{"id": "io", "kind": "stdio", "prompt": "Echo.", "reference": SECRET},
        "public": [{"stdin": "a", "stdout": "a"}],
        "hidden": [{"stdin": "77001", "stdout": "154002"}],
    },
    {"id": "n", "kind": "numeric", "prompt": "?", "answer": "154002", "reference": SECRET},
    {
        **{"id": "s", "kind": "suite", "prompt": "?", "reference": SECRET},
        "public": "def test_a():\n    pass\n",
        "hidden": "def test_secret():\n    assert 77001 + 77001 == 154002\n",
    },
]


@pytest.mark.parametrize("line", KINDS, ids=lambda line: str(line["kind"]))
def test_the_public_half_shows_nothing_hidden(line: dict[str, Any]) -> None:
    task = parse_task(json.dumps(line))
    text = json.dumps(public_view(task))
    for secret in ("77001", "154002", "secret"):
        assert secret not in text
    assert public_view(task)["hidden_cases"] == (2 if line["kind"] == "function" else 1)


def test_values_of_cases_are_tagged_json() -> None:
    task = parse_task(json.dumps(a_task()))
    assert task.kind == "function"
    assert task.hidden[1].args == [(3,)]
    shown = parse_task(json.dumps(a_task(public=[{"args": [{"$set": [1]}], "expected": {"$float": "nan"}}])))
    assert public_view(shown)["public"][0]["args"] == [{"$set": [1]}]


REFUSED = [
    a_task(extra=1), a_task(kind="puzzle"), a_task(entry="class"), a_task(entry="a b"), a_task(public=[], hidden=[]),
    a_task(prompt=""), a_task(attempts=0), a_task(limits={"timeout_s": 0}), a_task(limits={"cpus": 1}),
    a_task(hidden=[{"args": []}]),
    a_task(hidden=[{"args": [{"$unknown": 1}], "expected": 1}]), a_task(compare={"type": "unordered"}),
    a_task(scoring="half"), KINDS[2] | {"answer": "many"}, KINDS[2] | {"answer": True},
    KINDS[3] | {"hidden": "def test_(:"}, KINDS[3] | {"hidden": "def tset():\n    pass\n", "public": ""},
]  # fmt: skip


def test_invalid_task_is_refused() -> None:
    for line in REFUSED:
        with pytest.raises(ValidationError):
            parse_task(json.dumps(line))


def folder(tmp_path: Path, **splits: str) -> Path:
    for name, text in splits.items():
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def lines(count: int) -> str:
    return "".join(json.dumps(a_task(id=f"task {at} é")) + "\n" for at in range(count))


def test_splits_come_from_files(tmp_path: Path) -> None:
    tasks = JsonlTasks(folder(tmp_path, test=lines(1), extra=lines(2), train=lines(3)))
    assert tasks.list_splits() == [
        {"name": "train", "type": "train"},
        {"name": "test", "type": "test"},
        {"name": "extra", "type": "validation"},
    ]
    assert [tasks.num_tasks(split) for split in tasks.splits] == [3, 1, 2]
    assert JsonlTasks(tmp_path / "extra.jsonl").splits == ("extra",)
    for nowhere in (tmp_path / "none", tmp_path / "none.jsonl"):
        with pytest.raises(ConfigurationError):
            JsonlTasks(nowhere)


def test_byte_order_mark_of_a_file_is_no_part_of_its_first_task(tmp_path: Path) -> None:
    tasks = JsonlTasks(folder(tmp_path, train="\ufeff" + lines(2), test="\ufeff\n" + lines(1)))
    assert [tasks.task("train", at).id for at in range(2)] == ["task 0 é", "task 1 é"]
    assert (tasks.find("train", "task 0 é"), tasks.find("test", "task 0 é")) == (0, 0)
    assert (tasks.num_tasks("train"), tasks.num_tasks("test")) == (2, 1)


def test_tasks_are_read_where_they_are(tmp_path: Path) -> None:
    text = "\n" + lines(5).replace("\n", "\r\n\n  \n")
    tasks = JsonlTasks(folder(tmp_path, train=text.rstrip()))
    assert tasks.num_tasks("train") == 5
    assert [tasks.task("train", at).id for at in (4, 0, 2)] == ["task 4 é", "task 0 é", "task 2 é"]
    some = tasks.get_task_range("train", 1, -1)
    assert [view["id"] for view in some] == ["task 1 é", "task 2 é", "task 3 é"]
    assert len(tasks.list_tasks("train")) == 5
    assert "secret" not in json.dumps([tasks.list_tasks("train"), tasks.get_task("train", 0)])
    assert tasks.find("train", "task 3 é") == 3
    for odd in (5, -1, True, "0", None):
        with pytest.raises(IndexError):
            tasks.task("train", odd)  # type: ignore[arg-type]
    for call in (tasks.num_tasks, tasks.list_tasks):
        with pytest.raises(KeyError, match="train"):
            call("../train")
    with pytest.raises(KeyError):
        tasks.find("train", "task 9")


def test_mistake_is_reported_with_file_and_line(tmp_path: Path) -> None:
    text = lines(1) + "\n" + json.dumps(a_task(entry=3)) + "\n{\n"
    tasks = JsonlTasks(folder(tmp_path, train=text))
    with pytest.raises(InvalidTaskError, match=r"train\.jsonl:3: function\.entry"):
        tasks.get_task("train", 1)
    with pytest.raises(InvalidTaskError, match=r"train\.jsonl:4: "):
        tasks.get_task("train", 2)
    assert tasks.get_task("train", 0)["id"] == "task 0 é"
    hides = json.dumps(a_task(hidden=[{"args": ["77001"], "expect": 1}]))
    changed = folder(tmp_path, train=hides) / "train.jsonl"
    os.utime(changed, ns=(1, 1))
    with pytest.raises(InvalidTaskError, match="changed"):
        tasks.task("train", 0)
    with pytest.raises(InvalidTaskError) as error:  # which shows nothing of the line
        JsonlTasks(changed).get_task("train", 0)
    assert "77001" not in str(error.value)


def cases(*hidden: bool) -> list[CaseInfo]:
    return [CaseInfo(hidden=each) for each in hidden]


@pytest.mark.parametrize(
    ("scoring", "hidden", "passed", "reward"),
    [
        ("all_or_nothing", (False, True), (True, True), 1.0),
        ("all_or_nothing", (False, True), (False, True), 0.0),
        ("fraction", (False, True, True), (True, True, False), 0.5),
        ("fraction", (False, False), (True, False), 0.5),
        ("fraction", (False, True), (False, True), 2 / 3),
    ],
)
def test_the_reward(scoring: Any, hidden: tuple[bool, ...], passed: tuple[bool, ...], reward: float) -> None:
    assert reward_of(scoring, cases(*hidden), passed) == pytest.approx(reward)
