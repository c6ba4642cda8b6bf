"""Models on the wire, options of a reset, and settings of a server."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from envs.code_interpreter_env import (
    CodeInterpreterObservation,
    Execute,
    InvalidResetOptionError,
    PutFile,
    Submit,
)
from envs.code_interpreter_env.models import AnyAction
from envs.code_interpreter_env.server.backends import make_backend
from envs.code_interpreter_env.server.observations import to_observation, to_released
from envs.code_interpreter_env.server.options import read_options
from envs.code_interpreter_env.server.settings import InterpreterSettings
from openenv_core.errors import ConfigurationError
from openenv_core.protocol.frames import encode_observation
from openenv_core.sandbox import CodeError, Execution, FileInfo, Isolation, Limits, Output, Truncated
from openenv_core.tools import CallToolAction

ACTIONS: TypeAdapter[Any] = TypeAdapter(AnyAction)

EXECUTION = Execution(
    status="error",
    stdout="out\n",
    stderr="err\n",
    exit_code=1,
    error=CodeError(ename="ValueError", evalue="no", traceback=("a", "b")),
    result="3",
    outputs=(Output(output_type="display_data", data={"image/png": "AAEC"}, metadata={"a": {"b": 1}}),),
    execution_count=4,
    session_id="s",
    state_lost=True,
    cut=Truncated(stdout=True),
    signal=9,
    execution_time_s=0.25,
    max_rss_bytes=1024,
    files=(FileInfo(path="a/b", size=3, sha256="ff"),),
    isolation="lsm",
    reason="why",
)


class ReleasedObservation(BaseModel):
    """The released package's model of a coding environment's observation, as its client reads it."""

    model_config = ConfigDict(extra="forbid")

    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = {}
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


def test_action_is_identified_by_its_type_or_single_field() -> None:
    for data, action in (
        ({"code": "1"}, Execute(code="1")),
        ({"type": "execute", "code": "1", "stdin": "x"}, Execute(code="1", stdin="x")),
        ({"type": "put_file", "path": "a", "content": "é"}, PutFile(path="a", content="é")),
        ({"type": "submit", "code": "1"}, Submit(code="1")),
        ({"tool_name": "a", "arguments": {"b": 1}}, CallToolAction(tool_name="a", arguments={"b": 1})),
        ({"type": "call_tool", "tool_name": "a"}, CallToolAction(tool_name="a")),
    ):
        assert ACTIONS.validate_json(json.dumps(data)) == ACTIONS.validate_python(data) == action
    assert PutFile(path="a", content="é").data == "é".encode()
    assert PutFile(path="a", content_base64="AAEC").data == b"\x00\x01\x02"


PUT = {"type": "put_file", "path": "a"}


@pytest.mark.parametrize(
    "data",
    [
        *({}, {"type": "unknown"}, {"type": "execute"}, {"code": 1}, {"type": "restart", "code": "1"}, PUT),
        *(
            {"code": "1", more: value}
            for more, value in (("timeout_s", 0), ("timeout_s", inf), ("shell", True))
        ),
        *({**PUT, "content": "x", "content_base64": "AAEC"}, {**PUT, "content_base64": "***"}),
        *({**PUT, "path": "", "content": ""}, {"code": "x" * ((1 << 20) + 1)}),
    ],
)
def test_invalid_actions_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ACTIONS.validate_python(data)


def test_the_released_shape_has_no_other_key() -> None:
    envelope = json.loads(encode_observation(to_released(EXECUTION, "code")))["data"]
    observation = envelope["observation"]
    assert list(observation) == ["metadata", "stdout", "stderr", "exit_code"]
    seen = ReleasedObservation.model_validate(observation)
    # Whoever has three fields finds everything there that is in words.
    assert (seen.stdout, seen.stderr, seen.exit_code) == ("out\n", "err\na\nb\nwhy\n", 1)
    assert to_released(replace(EXECUTION, stderr="half", reason=None), "code").stderr == "half\na\nb\n"
    assert to_released(replace(EXECUTION, error=None, reason=None, stderr="half"), "code").stderr == "half"
    bare = replace(EXECUTION, error=CodeError(ename="E", evalue="v"), reason=None, stderr="")
    assert to_released(bare, "code").stderr == "E: v\n"
    assert seen.metadata["last_code"] == "code"
    assert seen.metadata == envelope["metadata"]
    # And with the fields of the full shape the same model refuses it, which is why there are two.
    full = json.loads(encode_observation(to_observation(EXECUTION)))["data"]["observation"]
    with pytest.raises(ValidationError):
        ReleasedObservation.model_validate(full)


def test_both_shapes_are_read_into_the_same_fields() -> None:
    read = []
    for observation in (to_observation(EXECUTION), to_released(EXECUTION, None)):
        data = json.loads(encode_observation(observation))["data"]
        fields = {**data["observation"], "reward": data["reward"], "done": data["done"]}
        read.append(CodeInterpreterObservation.model_validate(fields))
    assert read[0] == read[1]
    for field in ("status", "stdout", "error", "outputs", "cut", "files", "state_lost", "isolation"):
        assert getattr(read[0], field) == getattr(EXECUTION, field)


SETTINGS = InterpreterSettings(
    preload=("json",),
    packages=("json", "csv"),
    limits=Limits(timeout_s=4.0),
    ceilings=Limits(timeout_s=8.0),
    max_snapshot=True,
)


def test_without_options_the_server_decides() -> None:
    for options in ({}, {"packages": None, "limits": None, "files": None, "snapshot": None, "task": None}):
        choice = read_options(options, SETTINGS)
        assert (choice.packages, choice.limits.timeout_s, choice.files) == (("json",), 4.0, {})
        assert (choice.snapshot, choice.task) == (False, None)


def test_options_are_read() -> None:
    options = {
        **{"packages": ["csv", "json", "csv"], "snapshot": True, "task": "sum"},
        "limits": {"timeout_s": 8, "memory_bytes": 64 << 20},
        "files": {"a/b.txt": "é", "c": {"content_base64": "AAEC"}},
    }
    choice = read_options(options, SETTINGS)
    assert choice.packages == ("csv", "json")
    assert (choice.limits.timeout_s, choice.limits.memory_bytes) == (8, 64 << 20)
    assert choice.files == {"a/b.txt": "é".encode(), "c": b"\x00\x01\x02"}
    assert (choice.snapshot, choice.task) == (True, "sum")
    assert read_options({"packages": []}, SETTINGS).packages == ()
    with pytest.raises(InvalidResetOptionError, match="CODE_INTERPRETER_MAX_SNAPSHOT=true"):
        read_options({"snapshot": True}, replace(SETTINGS, max_snapshot=False))
    assert InterpreterSettings.from_environment({"CODE_INTERPRETER_MAX_SNAPSHOT": "true"}).max_snapshot
    assert read_options({"split": "train", "index": 3}, SETTINGS).task == {"split": "train", "index": 3}
    just_enough = {
        "limits": {"files": 8, "file_bytes": 4096},
        "files": {str(n): "x" * 4096 for n in range(8)},
    }
    assert len(read_options(just_enough, SETTINGS).files) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pakages": []}, "pakages"),
        ({"packages": ["os", "csv"]}, r"\(json, csv\), got os"),
        ({"limits": 3}, "limits: .*valid dictionary"),
        ({"limits": {"timeout": 3}}, "timeout"),
        ({"limits": {"timeout_s": 8.5}}, "at most 8.0 for the limit timeout_s"),
        ({"limits": {"timeout_s": float("nan")}}, "timeout_s"),
        ({"limits": {"allow_subprocess": True}}, "allow_subprocess"),
        ({"files": {"../a": ""}}, "relative to the workspace"),
        ({"files": {"/a": ""}}, "relative to the workspace"),
        ({"files": {"a\0": ""}}, "relative to the workspace"),
        ({"files": {"a": {"content_base64": "*"}}}, "base64"),
        ({"files": {"a": {"content_base64": "AAEC", "mode": 1}}}, "got dict"),
        ({"limits": {"file_bytes": 4096}, "files": {"a": "x" * 4097}}, "file_bytes"),
        ({"limits": {"disk_bytes": 64 << 10}, "files": {"a": "x" * 40_000, "b": "x" * 40_000}}, "disk_bytes"),
        ({"limits": {"files": 8}, "files": {str(n): "" for n in range(9)}}, "limit files"),
        ({"snapshot": "yes"}, "snapshot: .*valid boolean"),
        ({"task": "a", "index": 3}, "both"),
    ],
)
def test_invalid_options_are_refused_with_the_expected_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidResetOptionError, match=message):
        read_options(options, SETTINGS)


def test_settings_come_from_variables() -> None:
    variables = {
        "PRELOAD": "json, csv", "MINIMUM_ISOLATION": "PROCESS", "STRONGEST_ISOLATION": "lsm", "TIMEOUT_S": "2.5",
        "ALLOW_SUBPROCESS": "yes", "MAX_ALLOW_SUBPROCESS": "1", "MAX_MEMORY_BYTES": str(1 << 30),
        "MAX_SANDBOXES": "2", "TASKS": "/some/where", "BACKEND": " ",
    }  # fmt: skip
    environ = {f"CODE_INTERPRETER_{name}": value for name, value in variables.items()}
    settings = InterpreterSettings.from_environment({**environ, "PATH": "/bin"})
    assert settings.preload == ("json", "csv")
    assert {"json", "csv"} <= set(settings.packages)
    assert (settings.minimum_isolation, settings.strongest_isolation) == (Isolation.PROCESS, Isolation.LSM)
    assert (settings.limits.timeout_s, settings.limits.allow_subprocess) == (2.5, True)
    assert (settings.ceilings.memory_bytes, settings.max_sandboxes) == (1 << 30, 2)
    assert (settings.backend, settings.tasks) == ("local", "/some/where")
    with pytest.raises(ConfigurationError, match="local or together, got 'lokal'"):
        make_backend(InterpreterSettings(backend="lokal"), Isolation.LSM)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MINIMUM_ISOLATION": "strong"}, "'namespaces', 'lsm', 'seccomp' or 'process'"),
        ({"TIMEOUT_S": "soon"}, "CODE_INTERPRETER_TIMEOUT_S"),
        ({"TIMEOUT_S": "61"}, "CODE_INTERPRETER_MAX_"),
        ({"MAX_SANDBOXES": "0"}, "MAX_SANDBOXES"),
        ({"ALLOW_SUBPROCESS": "perhaps"}, "boolean"),
        ({"PRELOAD": "no_such_package"}, "no_such_package"),
        ({"PRELOAD": "json", "PACKAGES": "csv"}, "name it in both"),
    ],
)
def test_variables_that_cannot_be_used_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        InterpreterSettings.from_environment(
            {f"CODE_INTERPRETER_{name}": variables[name] for name in variables}
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
def test_reachable_server_needs_strong_isolation(exposed: bool | None, named: str | None, least: str) -> None:
    settings = InterpreterSettings(minimum_isolation=None if named is None else Isolation(named))
    assert settings.required_isolation(exposed) == least
    low = InterpreterSettings(strongest_isolation=Isolation.SECCOMP)
    with pytest.raises(ConfigurationError, match="CODE_INTERPRETER_MINIMUM_ISOLATION=seccomp"):
        low.required_isolation(None)


def test_tasks_are_hidden_where_they_really_lie(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (shipped,) = InterpreterSettings(tasks="shipped").task_files
    assert (shipped / "train.jsonl").is_file()
    assert shipped == shipped.resolve()
    assert InterpreterSettings(tasks=str(tmp_path / "link")).task_files == (tmp_path / "real",)
    assert InterpreterSettings(tasks="none").task_files == ()
