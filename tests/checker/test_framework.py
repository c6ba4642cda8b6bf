"""The checker's framework: outcomes of checks, sampling from schemas, reports."""

import json
import random
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from subjects import folder_with, run

from openenv_core import targets
from openenv_core.checker.check import (
    Check,
    CheckError,
    CheckLevel,
    CheckWarnedError,
    NotApplicableError,
    checks,
    select_checks,
)
from openenv_core.checker.drawing import pool, sample
from openenv_core.checker.playing import play_episode
from openenv_core.checker.results import CheckReport, Console, Status, as_json, run_check
from openenv_core.checker.subject import CheckLimits, Subject
from openenv_core.errors import ConfigurationError, ConnectionLostError, ExecutionError, RequestTimeoutError
from openenv_core.manifest import parse_manifest
from openenv_core.targets import Target, TargetKind, target_of

NOWHERE = Target(TargetKind.URL, "http://127.0.0.1:1")


def make_check(
    work: Any, level: CheckLevel = CheckLevel.STATIC, deadline_s: float = 20.0, name: str = "thing"
) -> Check:
    return Check(name, level, "It holds.", deadline_s, work)


def raising(error: BaseException) -> Any:
    def work(_: Subject) -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "status", "message", "change"),
    [
        (lambda _: None, Status.PASSED, "", ""),
        (lambda _: "3 figures", Status.PASSED, "3 figures", ""),
        (raising(CheckError("expected a, got b", change="do a")), Status.FAILED, "expected a, got b", "do a"),
        (raising(CheckWarnedError("doubtful", change="look")), Status.WARNED, "doubtful", "look"),
        (raising(NotApplicableError("no folder")), Status.SKIPPED, "no folder", ""),
        (raising(ConnectionLostError("gone")), Status.FAILED, "ConnectionLostError: gone", "ropewalk serve"),
        (raising(RequestTimeoutError("late")), Status.FAILED, "within 10 s", "--step-timeout"),
        (raising(KeyError("x")), Status.CRASHED, "KeyError: 'x' (", "report it as a bug"),
        (raising(SystemExit(3)), Status.CRASHED, "SystemExit: 3", "report it as a bug"),
    ],
)
def test_outcome_of_a_check(work: Any, status: Status, message: str, change: str) -> None:
    result = run_check(Subject(NOWHERE), make_check(work))
    assert result.status is status
    assert message in result.message
    assert change in result.change


def test_check_past_its_deadline_is_abandoned() -> None:
    result = run_check(Subject(NOWHERE), make_check(lambda _: time.sleep(1), deadline_s=0.05))
    assert result.status is Status.FAILED
    assert "within 0.05 s" in result.message


def test_episodes_too_few_for_a_verdict_are_not_played() -> None:
    subject = Subject(NOWHERE, limits=CheckLimits(episodes=39))
    (leak_check,) = select_checks(names=["resources_stay_level"])
    result = run_check(subject, leak_check)
    assert result.status is Status.SKIPPED
    assert "39 episodes are too few for a verdict" in result.message


def test_checks_are_chosen_by_level_and_by_name() -> None:
    assert select_checks() == checks()
    assert {one.level for one in select_checks([CheckLevel.RUNTIME])} == {CheckLevel.RUNTIME}
    named = select_checks(names=["episode-ends", "check_schema_valid"])
    assert [one.name for one in named] == ["schema_valid", "episode_ends"]
    with pytest.raises(ConfigurationError, match="did you mean 'episode_ends'"):
        select_checks(names=["episode_end"])


def report() -> CheckReport:
    hostile = CheckError("expected a,\n got \x1b[2J\x00b", change="do a")
    works = [
        make_check(lambda _: "fine", name="good"),
        make_check(raising(hostile), CheckLevel.RUNTIME, name="bad"),
        make_check(raising(NotApplicableError("no folder")), CheckLevel.RUNTIME, name="idle"),
        make_check(raising(CheckWarnedError("doubtful", change="look")), CheckLevel.RUNTIME, name="odd"),
        make_check(raising(KeyError("x")), CheckLevel.LOAD, name="broken"),
    ]
    return run(Subject(NOWHERE), works)


def test_the_report_for_programs() -> None:
    found = json.loads(as_json(report()))
    assert found["ok"] is False
    assert found["summary"] == {"passed": 1, "warned": 1, "failed": 1, "skipped": 1, "crashed": 1}


def test_the_report_for_people() -> None:
    out = StringIO()
    console = Console(out, 5)
    found = report()
    for result in found.results:
        console.begin(make_check(None, result.level, name=result.check))
        console.end(result)
    console.finish(found)
    text = out.getvalue()
    assert "\x1b" not in text  # neither ours, for this is no terminal, nor the subject's
    assert "\x00" not in text
    for words in ("good", "fine", "no folder", "runtime.bad", "change: do a", "warned: doubtful", "KeyError"):
        assert words in text
    assert "5 checks: 1 passed, 1 warned, 1 failed, 1 skipped, 1 crashed" in text


class Leaf(BaseModel):
    kids: list["Leaf"] = []
    size: int = Field(gt=3, lt=5)


class Left(BaseModel):
    side: Literal["left"] = "left"


class Right(BaseModel):
    side: Literal["right"] = "right"


class Everything(BaseModel):
    to: Annotated[Left | Right, Field(discriminator="side")]
    count: int
    share: Annotated[float, Field(ge=0, lt=1)]
    code: str = Field(pattern=r"^[a-z]{3}\d+$")
    few: list[int] = Field(max_length=3)
    tree: Leaf
    choice: Literal["x", "y"] | None
    table: dict[str, int]
    pair: tuple[int, str]
    unique: set[int]
    raw: bytes
    fives: Annotated[int, Field(multiple_of=5)]
    name: str = Field(min_length=2, max_length=4)
    metadata: dict[str, Any] = {}


@pytest.mark.slow
@pytest.mark.parametrize("modest", [True, False])
def test_samples_follow_the_schema_and_the_seed(modest: bool) -> None:
    schema = Everything.model_json_schema()
    samples = sample(schema, 40, 1, keep_small=modest)
    assert len(samples) == 40
    for value in samples:
        Everything.model_validate_json(json.dumps(value))
    assert samples == sample(schema, 40, 1, keep_small=modest)
    assert samples != sample(schema, 40, 2, keep_small=modest)
    assert any("metadata" in value for value in samples) is not modest
    assert {value["to"]["side"] for value in samples} == {"left", "right"}


def test_a_small_schema_is_exhausted_and_an_impossible_one_is_a_finding() -> None:
    schema = {"type": "object", "properties": {"move": {"enum": ["hit", "stand"]}}, "required": ["move"]}
    assert sorted(one["move"] for one in sample(schema, 64, 0)) == ["hit", "stand"]
    for impossible in ({"$ref": "#/$defs/gone"}, {"type": "integer", "minimum": 5, "maximum": 1}):
        with pytest.raises(CheckError, match="got none"):
            sample(impossible, 4, 0)
    # An author's examples go first, and are all that is drawn.
    drawn = pool({"type": "object", "examples": [{"b": 2}]}, [{"a": 1}], lambda: [], 0).draw(random.Random(0))
    first = [next(drawn) for _ in range(20)]
    assert first[:2] == [{"a": 1}, {"b": 2}]
    assert all(one in first[:2] for one in first)


def test_a_url_has_neither_folder_nor_code_nor_a_server_of_ours() -> None:
    subject = Subject(NOWHERE)
    assert subject.cap is None
    uses = (lambda: subject.manifest, lambda: subject.app, subject.require_folder, subject.server().__enter__)
    for use in uses:
        with pytest.raises(NotApplicableError):
            use()


def test_every_fault_of_a_manifest_is_told_at_once() -> None:
    content = {"spec_version": 2, "nmae": "x", "validation": {"episodes": {"endles": True}}}
    with pytest.raises(ConfigurationError) as error:
        parse_manifest(content)
    for words in ("spec_version", "name: missing", "did you mean 'name'", "did you mean 'endless'"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("https://a.org/x", TargetKind.URL),
        ("nosuch.module:app", TargetKind.MODULE),
        ("docker://blackjack-env", TargetKind.IMAGE),
        ("docker://registry.example.org:5000/team/blackjack-env:1", TargetKind.IMAGE),
        ("blackjack-env", TargetKind.NAME),
    ],
)
def test_target_of_a_text(text: str, kind: TargetKind, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    assert target_of(text).kind is kind


def test_paths_are_found_and_followed(tmp_path: Path, monkeypatch: Any) -> None:
    folder = folder_with(tmp_path / "walk_env")
    monkeypatch.chdir(tmp_path)
    assert target_of("walk_env") == Target(TargetKind.PATH, str(folder), folder)
    monkeypatch.chdir(folder)
    assert target_of(".").folder == folder
    file = f"{folder / 'server' / 'app.py'}:other"
    assert target_of(file) == Target(TargetKind.PATH, file, folder)
    with pytest.raises(ConfigurationError, match="no folder or file"):
        target_of("./nowhere")


def test_without_the_entry_point_of_apps_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(targets, "APPS", "ropewalk.nobody")
    with pytest.raises(ConfigurationError, match=r"ropewalk\[server\]"):
        targets.load_app("blackjack")


def test_equal_failures_are_reported_once() -> None:
    with Subject(NOWHERE) as subject:
        a, b = (CheckError(f"expected {n}", change="do a", cause="one") for n in "ab")
        c, d = (ExecutionError("no task", code="EXECUTION_ERROR") for _ in range(2))
        works = [
            make_check(raising(error), name=name) for name, error in zip("abcd", (a, b, c, d), strict=True)
        ]
        found = run(subject, works).results
    assert [one.status for one in found] == [Status.FAILED, Status.SKIPPED] * 2
    assert found[1].message == "as a"
    assert "reset_options" in found[2].change


def test_a_slow_reset_leaves_an_episode_its_time() -> None:
    def reset(**_: Any) -> Any:
        time.sleep(0.3)
        return SimpleNamespace(done=False)

    slow: Any = SimpleNamespace(reset=reset, step=lambda _: SimpleNamespace(done=False))
    subject: Any = SimpleNamespace(actions=lambda _: iter([{"n": 1}] * 3))
    assert len(list(play_episode(subject, slow, 0, seconds=0.2))) == 4
