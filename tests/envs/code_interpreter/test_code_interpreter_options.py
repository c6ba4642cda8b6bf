"""What a reset may ask for, and what a server can be told."""

from pathlib import Path
from typing import Any

import pytest

from envs.code_interpreter_env import InvalidResetOption
from envs.code_interpreter_env.server.options import chosen
from envs.code_interpreter_env.server.settings import InterpreterSettings
from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import Isolation, Limits

SETTINGS = InterpreterSettings(
    preload=("json",),
    packages=("json", "csv"),
    limits=Limits(timeout_s=4.0),
    ceilings=Limits(timeout_s=8.0),
)


def test_without_options_the_server_decides() -> None:
    for options in ({}, {"packages": None, "limits": None, "files": None, "snapshot": None, "task": None}):
        choice = chosen(options, SETTINGS)
        assert (choice.packages, choice.limits.timeout_s, choice.files) == (("json",), 4.0, {})
        assert (choice.snapshot, choice.task) == (False, None)


def test_options_are_read() -> None:
    choice = chosen(
        {
            "packages": ["csv", "json", "csv"],
            "limits": {"timeout_s": 8, "memory_bytes": 64 << 20},
            "files": {"a/b.txt": "é", "c": {"content_base64": "AAEC"}},
            "snapshot": True,
            "task": "sum",
        },
        SETTINGS,
    )
    assert choice.packages == ("csv", "json")
    assert (choice.limits.timeout_s, choice.limits.memory_bytes) == (8, 64 << 20)
    assert choice.files == {"a/b.txt": "é".encode(), "c": b"\x00\x01\x02"}
    assert (choice.snapshot, choice.task) == (True, "sum")
    assert chosen({"packages": []}, SETTINGS).packages == ()
    full = {"limits": {"files": 8, "file_bytes": 4096}, "files": {str(n): "x" * 4096 for n in range(8)}}
    assert len(chosen(full, SETTINGS).files) == 8


def test_a_task_can_be_named_as_the_task_routes_count_them() -> None:
    assert chosen({"split": "train", "index": 3}, SETTINGS).task == {"split": "train", "index": 3}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pakages": []}, "pakages"),
        ({"packages": "csv"}, "list of names"),
        ({"packages": ["os", "csv"]}, r"\(json, csv\), got os"),
        ({"packages": [1]}, "list of names"),
        ({"limits": 3}, "limits by name"),
        ({"limits": {"timeout": 3}}, "timeout"),
        ({"limits": {"timeout_s": 8.5}}, "at most 8.0 for the limit timeout_s"),
        ({"limits": {"timeout_s": "3"}}, "timeout_s"),
        ({"limits": {"timeout_s": float("nan")}}, "timeout_s"),
        ({"limits": {"allow_subprocess": True}}, "allow_subprocess"),
        ({"files": ["a"]}, "content by path"),
        ({"files": {"../a": ""}}, "relative to the workspace"),
        ({"files": {"/a": ""}}, "relative to the workspace"),
        ({"files": {"a\0": ""}}, "relative to the workspace"),
        ({"files": {"": ""}}, "relative to the workspace"),
        ({"files": {"a": 1}}, "got int"),
        ({"files": {"a": {"content_base64": "*"}}}, "base64"),
        ({"files": {"a": {"content_base64": "AAEC", "mode": 1}}}, "got dict"),
        ({"limits": {"file_bytes": 4096}, "files": {"a": "x" * 4097}}, "file_bytes"),
        (
            {"limits": {"disk_bytes": 64 << 10}, "files": {str(n): "x" * 40_000 for n in range(2)}},
            "disk_bytes",
        ),
        ({"limits": {"files": 8}, "files": {str(n): "" for n in range(9)}}, "limit files"),
        ({"snapshot": "yes"}, "true or false"),
        ({"task": "a", "index": 3}, "both"),
    ],
)
def test_bad_options_are_refused_with_what_was_expected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidResetOption, match=said):
        chosen(options, SETTINGS)


def test_settings_come_from_variables() -> None:
    settings = InterpreterSettings.from_environment(
        {
            "CODE_INTERPRETER_PRELOAD": "json, csv",
            "CODE_INTERPRETER_MINIMUM_ISOLATION": "PROCESS",
            "CODE_INTERPRETER_STRONGEST_ISOLATION": "lsm",
            "CODE_INTERPRETER_TIMEOUT_S": "2.5",
            "CODE_INTERPRETER_ALLOW_SUBPROCESS": "yes",
            "CODE_INTERPRETER_MAX_ALLOW_SUBPROCESS": "1",
            "CODE_INTERPRETER_MAX_MEMORY_BYTES": str(1 << 30),
            "CODE_INTERPRETER_MAX_SANDBOXES": "2",
            "CODE_INTERPRETER_TASKS": "/some/where",
            "CODE_INTERPRETER_BACKEND": " ",
            "PATH": "/bin",
        }
    )
    assert settings.preload == ("json", "csv")
    assert {"json", "csv"} <= set(settings.packages)
    assert settings.minimum_isolation is Isolation.PROCESS
    assert settings.strongest_isolation is Isolation.LSM
    assert (settings.limits.timeout_s, settings.limits.allow_subprocess) == (2.5, True)
    assert (settings.ceilings.memory_bytes, settings.max_sandboxes) == (1 << 30, 2)
    assert (settings.backend, settings.tasks) == ("local", "/some/where")
    nothing = InterpreterSettings.from_environment({"CODE_INTERPRETER_PRELOAD": "none"})
    assert nothing.preload == ()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MINIMUM_ISOLATION", "strong", "namespaces, lsm, seccomp, process"),
        ("TIMEOUT_S", "soon", "CODE_INTERPRETER_TIMEOUT_S"),
        ("TIMEOUT_S", "-1", "timeout_s"),
        ("TIMEOUT_S", "61", "CODE_INTERPRETER_MAX_"),
        ("FILES", "1.5", "CODE_INTERPRETER_FILES"),
        ("MAX_SANDBOXES", "0", "MAX_SANDBOXES"),
        ("ALLOW_SUBPROCESS", "perhaps", "true or false"),
        ("PRELOAD", "no_such_package", "no_such_package"),
        ("PACKAGES", "json no_such_package", "no_such_package"),
    ],
)
def test_variables_that_cannot_be_used_are_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        InterpreterSettings.from_environment({f"CODE_INTERPRETER_{variable}": value})


def test_what_is_preloaded_has_to_be_offered() -> None:
    with pytest.raises(ConfigurationError, match="name it in both"):
        InterpreterSettings.from_environment(
            {"CODE_INTERPRETER_PRELOAD": "json", "CODE_INTERPRETER_PACKAGES": "csv"}
        )


@pytest.mark.parametrize(
    ("exposed", "named", "least"),
    [
        (True, None, "lsm"),
        (None, None, "lsm"),
        (False, None, "process"),
        (True, "process", "process"),
        (False, "namespaces", "namespaces"),
    ],
)
def test_who_can_reach_a_server_decides_how_strong_its_walls_must_be(
    exposed: bool | None, named: str | None, least: str
) -> None:
    settings = InterpreterSettings(minimum_isolation=None if named is None else Isolation(named))
    assert settings.least(exposed) == least


def test_a_search_that_begins_too_low_is_refused() -> None:
    settings = InterpreterSettings(strongest_isolation=Isolation.SECCOMP)
    with pytest.raises(ConfigurationError, match="CODE_INTERPRETER_MINIMUM_ISOLATION=seccomp"):
        settings.least(None)
    assert settings.least(False) is Isolation.PROCESS


def test_tasks_are_hidden_where_they_really_lie(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (shipped,) = InterpreterSettings(tasks="shipped").task_files
    assert (shipped / "train.jsonl").is_file()
    assert shipped == shipped.resolve()
    assert InterpreterSettings(tasks=str(tmp_path / "link")).task_files == (tmp_path / "real",)
    assert InterpreterSettings(tasks="none").task_files == ()
